"""Decode steps as compiled programs: the same logits and text, hits told, nothing made twice.

Compiling takes a C++ compiler and seconds, so most tests run the traced graph as it is; what is
traced is the same. Two programs are really compiled.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stepscope.engine.request import Request
from stepscope.engine.scheduler import Limits
from stepscope.errors import StepscopeError, UsageError
from stepscope.models.decoder import Decoder
from stepscope.models.load import load_model
from stepscope.records import StepRecord
from stepscope.runner import compiled
from stepscope.runner.compiled import FEW, MANY, CompiledDecode
from stepscope.runner.torch_runner import TorchRunner
from stepscope.runner.traced import trace
from stepscope.scenario import apply_overrides, load_scenario
from tests.engine.families import FAMILIES, make
from tests.engine.harness import (
    Observed,
    Outcome,
    ask,
    products_here,
    run,
    same_text,
    small_decoder,
)
from tests.engine.test_forward import Bench, last, prefilled

NEAR = 1e-3
CONTEXTS = [9, 130, 17, 40, 3, 64]
TRAITS = ("Llama: YaRN", "Mistral", "Qwen 2.5", "Qwen 3: qk-norm", "Gemma 2", "Gemma 3")
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++"))), reason="there is no C++ compiler"
)


def as_traced(decoder: Decoder, form: compiled.Form, digest: str, told: compiled.Told) -> Any:
    """The graph itself in place of the program made of it."""
    return trace(decoder.spec, dict(decoder.plain_weights()), form.rows).module()


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "program_of", as_traced)


def give_graphs(runner: TorchRunner, buckets: Sequence[int] = (4, 16)) -> CompiledDecode:
    runner.graphs = CompiledDecode(runner.decoder, runner.attention, buckets)
    return runner.graphs


class Narrow(Bench):
    """Of tokens that a small vocabulary has."""

    def request(self, id: int, tokens: int, seed: int | None = None) -> Request:
        made = super().request(id, tokens, seed)
        made.tokens[:] = [t % self.runner.decoder.spec.vocab for t in made.tokens]
        return made


def assert_same_logits(decoder: Decoder, counts: Sequence[int] = (1, 2, 4, 6)) -> None:
    made = Narrow(decoder)
    running = prefilled(made, CONTEXTS)
    eager = {n: made.logits(*map(last, running[:n])) for n in counts}
    give_graphs(made.runner)
    for n, expected in eager.items():
        got = made.logits(*map(last, running[:n]))
        assert got.shape == expected.shape
        assert torch.isfinite(got).all() and (got - expected).abs().max() < NEAR, n
        best = expected.topk(2).values
        sure = best[:, 0] - best[:, 1] > 2 * NEAR
        assert torch.equal(got.argmax(-1)[sure], expected.argmax(-1)[sure])


# ------------------------------------------------------------------ what is traced


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("family", [f for f in FAMILIES if f.name.startswith(TRAITS)], ids=str)
def test_every_trait_of_a_family_is_in_the_graph(family: Any, tmp_path: Path) -> None:
    make(family, tmp_path)
    model = load_model(str(tmp_path), "fp32")
    assert_same_logits(Decoder(model.spec, model.weights))


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("products", products_here())
@pytest.mark.parametrize("kv_dtype", ["fp32", "int8"])
def test_any_layout_of_weights_and_any_cache(products: str, kv_dtype: str) -> None:
    decoder = small_decoder(products=products)
    decoder.spec = replace(decoder.spec, kv_dtype=kv_dtype)
    assert_same_logits(decoder)


def test_the_weights_come_out_as_they_went_in() -> None:
    model = load_model(
        "dummy:Qwen3-0.6B", "fp32", overrides={"layers": 2, "hidden": 32, "vocab": 60}
    )
    before = {name: tensor.clone() for name, tensor in model.weights.items()}
    for products in products_here():
        decoder = Decoder(model.spec, {k: v.clone() for k, v in before.items()}, products)
        after = dict(decoder.plain_weights())
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], before[name]) for name in before)


# ------------------------------------------------------------------ in the engine


def served(runner: TorchRunner, pages: int, **options: Any) -> tuple[Outcome, Observed]:
    """Prompts of all lengths, in chunks beside decodes, with freed pages poisoned."""
    sizes = [(9, 20), (30, 12), (3, 25), (17, 8), (22, 15), (5, 30)]
    observed = Observed(runner)
    asked = [ask(i, p, m, ignore_eos=True) for i, (p, m) in enumerate(sizes)]
    limits = Limits(max_seqs=6, token_budget=48, chunk=16)
    done = run(asked, runner=observed, pages=pages, page_size=8, limits=limits, **options)
    return done, observed


def decodes_only(rows: Sequence[StepRecord]) -> list[StepRecord]:
    return [row for row in rows if row.kind == "decode"]


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("options", [{}, {"prefix": "radix"}, {"overlap": True}], ids=str)
def test_the_text_is_the_same_and_hits_are_told(options: dict[str, Any]) -> None:
    expected, seen = served(TorchRunner(small_decoder(), 14, 8), 14, **options)
    runner = TorchRunner(small_decoder(), 14, 8)
    give_graphs(runner, (4,))
    done, _ = served(runner, 14, **options)
    same_text(expected.outputs, seen.gaps, done.outputs)
    assert done.trace == expected.trace and done.preemptions > 0
    batches = {row.num_decode_requests: row for row in decodes_only(done.work)}
    assert {n for n in batches if n and n > 4} and {n for n in batches if n and n <= 4}
    for row in done.work:
        small = row.kind == "decode" and (row.num_decode_requests or 0) <= 4
        assert row.graph == ("compile" if small else "eager")
        assert row.graph_hit == (int(small) if row.kind == "decode" else None)
        assert row.padded_batch == (row.num_decode_requests if small else None)
        assert row.gather_ns is not None and row.kv_gather_bytes, "the gather is still seen"


@pytest.mark.usefixtures("uncompiled")
def test_a_step_that_fails_leaves_nothing_behind() -> None:
    """The next step, of the same thread, is its own."""
    made = Bench(small_decoder())
    running = prefilled(made, CONTEXTS[:2])
    expected = made.logits(*map(last, running))
    graphs = give_graphs(made.runner)
    working = graphs._programs
    graphs._programs = dict.fromkeys(working, lambda x, positions: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made.logits(*map(last, running))
    graphs._programs = working
    assert (made.logits(*map(last, running)) - expected).abs().max() < NEAR


@pytest.mark.parametrize(
    "buckets,forms", [((4,), [FEW]), ((1,), [FEW]), ((16,), [MANY]), ((16, 1), [FEW, MANY])]
)
def test_only_programs_that_some_bucket_needs(
    monkeypatch: pytest.MonkeyPatch, buckets: tuple[int, ...], forms: list[compiled.Form]
) -> None:
    monkeypatch.setattr(compiled, "program_of", lambda decoder, form, digest, told: form)
    runner = TorchRunner(small_decoder(), 4, 16)
    graphs = give_graphs(runner, buckets)
    assert list(graphs._programs) == forms == list(graphs._programs.values())
    most = max(buckets)
    assert [graphs.bucket(n) for n in (1, most, most + 1)] == [1, most, None], "nothing is padded"


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    "name,dtype,sentence",
    [
        ("dummy:Mixtral-8x7B-v0.1", "fp32", "without routed experts.*use --graphs eager"),
        ("dummy:llama", "int8", "fp32 or bf16, and these are int8; use --graphs eager"),
    ],
)
def test_what_is_not_compiled_says_so(name: str, dtype: str, sentence: str) -> None:
    sizes = {"layers": 1, "hidden": 64, "vocab": 60, "intermediate": 64}
    model = load_model(name, dtype, overrides=sizes)
    runner = TorchRunner(Decoder(model.spec, model.weights, "plain"), 4, 16)
    with pytest.raises(UsageError, match=sentence):
        give_graphs(runner)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path))
    return tmp_path / "compiled"


@pytest.mark.usefixtures("cache")
def test_without_a_compiler_one_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = TorchRunner(small_decoder(), 4, 16)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UsageError, match=r"C\+\+ compiler; install g\+\+ .* --graphs eager"):
        give_graphs(runner)
    monkeypatch.undo()


@pytest.mark.usefixtures("cache")
def test_without_headers_one_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/g++")
    monkeypatch.setattr(compiled.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(UsageError, match=r"headers of Python 3\.\d+; install them .*eager"):
        give_graphs(TorchRunner(small_decoder(), 4, 16))


# ------------------------------------------------------------------ the cache


class FakeCompiler:
    """Writes a file in place of a program, and loads what it wrote."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[Path] = []
        monkeypatch.setattr(compiled, "_require_compiler", lambda: None)
        monkeypatch.setattr(compiled, "_compile", self.compile)
        monkeypatch.setattr(compiled, "_load", self.load)

    def compile(self, decoder: Decoder, form: compiled.Form, file: Path) -> None:
        self.made.append(file)
        file.write_text("a program")

    def load(self, file: Path) -> str:
        if file.read_text() != "a program":
            raise RuntimeError("no archive")
        return file.name


def names(decoder: Decoder, buckets: Sequence[int] = (4,)) -> list[Any]:
    said: list[str] = []
    runner = TorchRunner(decoder, 4, 16)
    graphs = CompiledDecode(decoder, runner.attention, buckets, said.append)
    assert said and graphs.seconds
    return list(graphs._programs.values())


def test_the_second_time_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    compiler = FakeCompiler(monkeypatch)
    first = names(small_decoder(), (4, 16))
    assert len(compiler.made) == 2 == len(list(cache.iterdir()))
    assert names(small_decoder(), (4, 16)) == first and len(compiler.made) == 2
    compiler.made[0].write_text("half a prog")
    assert names(small_decoder(), (4, 16)) == first and len(compiler.made) == 3, "made anew"


def test_a_program_is_of_its_weights_shape_and_threads(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    FakeCompiler(monkeypatch)
    one = small_decoder()
    other = small_decoder()
    other.layers[0].mlp_norm[0] += 1e-3
    eps = small_decoder()
    eps.spec = replace(eps.spec, norm_eps=1e-4)
    found = [names(decoder)[0] for decoder in (one, other, eps)]
    if "onednn" in products_here():
        assert names(small_decoder(products="onednn"))[0] == found[0], "whatever multiplies eagerly"
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        found += names(one)
    finally:
        torch.set_num_threads(threads)
    assert len(set(found)) == 4


def test_only_the_programs_used_last_stay(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    FakeCompiler(monkeypatch)
    kept = []
    for i in range(compiled.KEPT + 2):
        decoder = small_decoder()
        decoder.final_norm[0] = i
        kept.append(names(decoder)[0])
    assert {file.name for file in cache.iterdir()} == set(kept[2:])


def test_what_torch_cannot_compile_ends_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        assert not torch.is_grad_enabled(), "else torch freezes nothing"
        raise RuntimeError("CppCompileError: no\nand more")

    monkeypatch.setattr(compiled, "_require_compiler", lambda: None)
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", fail)
    with pytest.raises(StepscopeError, match=r"compile this model \(Cpp.*: no\); use --graphs ea"):
        names(small_decoder())
    assert list(cache.iterdir()) == []


# ------------------------------------------------------------------ compiled


@needs_compiler
def test_a_compiled_program_and_the_same_from_the_cache(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    """Grouped heads and a window, for many rows and for one."""
    made = replace(small_decoder().spec, window=12, layer_pattern="sf", final_softcap=20.0)

    def decoder() -> Decoder:
        found = small_decoder()
        found.spec = made
        found.layers[0].local = True
        return found

    monkeypatch.setattr(compiled, "_form", lambda rows: MANY)
    assert_same_logits(decoder())
    monkeypatch.setattr(compiled, "_compile", lambda *args: pytest.fail("compiled again"))
    assert_same_logits(decoder())
    assert [file.suffix for file in cache.iterdir()] == [".pt2"]


@needs_compiler
@pytest.mark.parametrize("family", [f for f in FAMILIES if f.name == "Gemma 2"], ids=str)
def test_generated_products_and_all_traits(
    family: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    make(family, tmp_path / "model")
    model = load_model(str(tmp_path / "model"), "fp32")
    monkeypatch.setattr(compiled, "_form", lambda rows: FEW)
    assert_same_logits(Decoder(model.spec, model.weights), (1, 3, 4))


# ------------------------------------------------------------------ from a scenario


def test_a_scenario_says_up_to_how_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from stepscope.runner.launching import attach_graphs, check_launching

    found: list[tuple[int, ...]] = []

    def fake(
        decoder: Any, attention: Any, buckets: tuple[int, ...], told: Callable[..., None]
    ) -> None:
        found.append(tuple(buckets))

    monkeypatch.setattr("stepscope.runner.launching.CompiledDecode", fake)
    base = apply_overrides(load_scenario("quickstart"), {"engine.graphs": "compile"})
    runner = TorchRunner(small_decoder(), 4, 16)
    default = (1, 2, 4, 8, 16)
    for changes, expected in (({}, default), ({"engine.graph_buckets": [1, 16]}, (1, 16))):
        engine = apply_overrides(base, changes).engine
        check_launching(engine, "cpu")
        attach_graphs(runner, engine, 16, lambda text: None)
        assert found[-1] == expected
    attach_graphs(runner, base.engine, 2, lambda text: None)
    assert found[-1] == (1, 2)
    check_launching(replace(base.engine, attention="gather"), "cuda")  # which has its own way

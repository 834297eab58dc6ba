"""Decode steps compiled ahead of time: everything between the attention calls is one C++ program.

The weights are frozen into the program, in the layout of whichever matrix kernel is faster at its
number of rows. torch.compile caches nothing that has frozen weights, so that each start would cost
minutes; AOTInductor, the same compiler ahead of time, makes a file that loads in about a second.

The number of rows is left open, so nothing is padded and nothing compiles while requests are
served. There are two programs: at a few rows generated kernels stream the weights faster than
oneDNN does, above that they are several times slower.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import io
import os
import shutil
import sys
import sysconfig
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stepscope.cache import cache_directory
from stepscope.device.host import machine_key
from stepscope.engine.plan import Lap
from stepscope.errors import StepscopeError, UsageError
from stepscope.models import decoder as decoder_source
from stepscope.models import experts, linear, rope
from stepscope.models.backends import Attention
from stepscope.models.decoder import Decoder
from stepscope.models.tensors import check_free
from stepscope.runner import traced
from stepscope.runner.traced import Step, trace, under_way

COMPILED_DTYPES = ("fp32", "bf16")
KEPT = 6  # programs in the cache; each holds a copy of a model's weights
SOURCES = (decoder_source, experts, linear, rope, traced)  # a change of them is another program
REMEDY = "use --graphs eager"

Program = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Told = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Form:
    """For steps of `first` rows or more; made for `rows`, with these kernels of matrix products.

    CPP: generated (oneDNN where torch cannot), ATEN: oneDNN. Not both, of which torch would take
    the faster one: it times one matrix at a time, out of the cache, and so takes the wrong one.
    """

    first: int
    rows: int
    kernels: str


FEW_ROWS = 4  # torch's generated kernels keep so many rows in registers
FEW, MANY = Form(1, FEW_ROWS, "CPP"), Form(FEW_ROWS + 1, 16, "ATEN")
# Elements for which a kernel between the products is given a second thread; torch's 512 would wake
# it for a few rows of activations.
PARALLEL_ELEMENTS = 16_384


def _form(rows: int) -> Form:
    return FEW if rows < MANY.first else MANY


class CompiledDecode:
    """The programs for steps of up to the largest bucket. See `runner.torch_runner.DecodeGraphs`.

    Raises UsageError for what is not compiled, and where a compiler is needed and absent.
    """

    kind = "compile"
    pads = False

    def __init__(
        self,
        decoder: Decoder,
        attention: Attention,
        buckets: Sequence[int],
        told: Told = lambda text: None,
    ) -> None:
        spec = decoder.spec
        if spec.experts:
            raise UsageError(
                "graphs = compile needs a step without routed experts, as what is computed depends "
                f"on their choice; {REMEDY}"
            )
        if spec.dtype not in COMPILED_DTYPES:
            raise UsageError(
                f"graphs = compile takes weights in {' or '.join(COMPILED_DTYPES)}, and these are "
                f"{spec.dtype}; {REMEDY}"
            )
        self._decoder, self._attention = decoder, attention
        self._local = [layer.local for layer in decoder.layers]
        self.buckets = tuple(sorted(buckets))
        self.seconds: dict[str, float] = {}  # until each program was ready
        forms = sorted({_form(bucket) for bucket in buckets}, key=lambda form: form.first)
        copies = "A compiled copy" if len(forms) == 1 else "Two compiled copies"
        check_free(f"{copies} of the weights", len(forms) * spec.weight_bytes, REMEDY)
        digest = weights_digest(decoder)
        self._programs = {form: self._ready(form, digest, told) for form in forms}

    def _ready(self, form: Form, digest: str, told: Told) -> Program:
        begin = time.monotonic()
        label = f"{form.first} rows or more" if form is MANY else f"up to {MANY.first - 1} rows"
        program = program_of(self._decoder, form, digest, lambda text: told(f"{text} {label}"))
        self.seconds[label] = round(time.monotonic() - begin, 1)
        return program

    def bucket(self, n: int) -> int | None:
        """n itself, since the programs take any number."""
        return n if n <= self.buckets[-1] else None

    @torch.inference_mode()
    def run(
        self, tokens: torch.Tensor, positions: torch.Tensor, attention: Any, lap: Lap
    ) -> torch.Tensor:
        program = self._programs.get(_form(tokens.shape[0])) or self._programs[MANY]
        with under_way(Step(self._attention, self._local, attention, lap)):
            return program(self._decoder.embedded(tokens), positions)


# ---------------------------------------------------------------- programs in the cache


def weights_digest(decoder: Decoder) -> str:
    """A program holds weights, so it belongs to exactly these."""
    digest = hashlib.sha256()
    for name, weight in decoder.plain_weights():
        digest.update(name.encode())
        digest.update(weight.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def program_of(decoder: Decoder, form: Form, digest: str, told: Told) -> Program:
    """From the cache, or compiled into it."""
    file = program_file(decoder, form, digest)
    if file.exists():
        told("loading the program compiled earlier for")
        with contextlib.suppress(RuntimeError):  # torch's own, for a file that is no program
            os.utime(file)
            return _load(file)
    _require_compiler()
    told("compiling (once; a minute or two) for")
    file.parent.mkdir(parents=True, exist_ok=True)
    _compile(decoder, form, file)
    _forget_old(file.parent)
    return _load(file)


def program_file(decoder: Decoder, form: Form, digest: str) -> Path:
    """Generated code depends on the CPU, the threads and torch as much as on the model."""
    sources = [Path(str(module.__file__)).read_bytes() for module in SOURCES]
    parts = (
        form,
        _settings(form),
        decoder.spec,
        digest,
        torch.__version__,
        torch.get_num_threads(),
        torch.backends.cpu.get_cpu_capability(),
        hashlib.sha256(b"".join(sources)).hexdigest(),
    )
    name = hashlib.sha256(repr(parts).encode()).hexdigest()[:24]
    return cache_directory() / "compiled" / f"{machine_key()}-{name}.pt2"


def _load(file: Path) -> Program:
    program: Program = torch._inductor.aoti_load_package(str(file))
    return program


def _compile(decoder: Decoder, form: Form, file: Path) -> None:
    """Raises StepscopeError if torch cannot."""
    from torch._inductor.async_compile import shutdown_compile_workers
    from torch._inductor.utils import fresh_cache

    unfinished = file.with_name(f"{os.getpid()}-{file.name}")
    chatter = io.StringIO()  # torch prints its timings of kernels
    try:
        # In a directory of its own: what torch leaves behind is several times the weights.
        with fresh_cache(), warnings.catch_warnings(), contextlib.redirect_stderr(chatter):
            warnings.simplefilter("ignore")
            program = trace(decoder.spec, dict(decoder.plain_weights()), form.rows)
            with torch.no_grad():  # or nothing is frozen, and nobody says so
                torch._inductor.aoti_compile_and_package(
                    program, package_path=str(unfinished), inductor_configs=_settings(form)
                )
        os.replace(unfinished, file)
    except RuntimeError as error:
        first = str(error).strip().splitlines()[0]
        raise StepscopeError(f"torch could not compile this model ({first}); {REMEDY}.") from error
    finally:
        unfinished.unlink(missing_ok=True)
        shutdown_compile_workers()
        gc.collect()  # a large graph: not while requests are served


def _settings(form: Form) -> dict[str, Any]:
    return {
        "freezing": True,
        "max_autotune": True,
        "max_autotune_gemm_backends": form.kernels,
        "cpp.min_chunk_size": PARALLEL_ELEMENTS,
    }


def _require_compiler() -> None:
    """Raises UsageError without a C++ compiler or Python's headers."""
    names = [os.environ.get("CXX", "g++"), "clang++"]
    if not any(map(shutil.which, names)):
        raise UsageError(
            f"graphs = compile needs a C++ compiler; install g++ (Debian: apt install g++) or "
            f"{REMEDY}"
        )
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise UsageError(
            f"graphs = compile needs the headers of Python {version}; install them (Debian: apt "
            f"install python{version}-dev) or {REMEDY}"
        )


def _forget_old(folder: Path) -> None:
    """Each program is as large as its model, so only those used last stay."""
    programs = sorted(folder.glob("*.pt2"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in programs[KEPT:]:
        file.unlink(missing_ok=True)

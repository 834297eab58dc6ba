"""The ceilings card: what the device was measured to reach, beside what the model needs."""

from __future__ import annotations

from stepscope.roofline import Ceilings
from stepscope.spec import QUANTIZED, ModelSpec
from stepscope.text import ms, sig, size


def card_text(spec: ModelSpec, ceilings: Ceilings, products: str = "plain") -> str:
    """Plain text, a line per fact, with units. products: which the engine takes here."""
    rate = ceilings.read_rate(spec.weight_bytes)
    bound_ns = spec.weight_bytes / rate * 1e9
    lines = [
        f"{spec.name} {spec.dtype} on {ceilings.device}, {ceilings.threads} threads   MEASURED",
        "",
        f"weights read per step   {size(spec.weight_bytes)}",
        f"KV per token            {size(spec.kv_bytes_per_token)}",
        f"read rate there         {size(rate)}/s",
        f"bound                   {ms(bound_ns)} ms per step, "
        f"{sig(1e9 / bound_ns)} tok/s at batch 1",
        "",
        "read bandwidth by working set",
        *(f"  {size(at):>10}   {size(value)}/s" for at, value in ceilings.read_curve),
        *_products(spec, products),
        *(
            f"  {p.name:<8} {p.rows:>6} x {p.cols:<6} {p.dtype}   {size(p.bytes_per_s)}/s"
            for p in ceilings.gemv
        ),
        "matrix products, best rate",
        *(f"  {dtype:<6} {sig(rate / 1e9)} GFLOP/s" for dtype, rate in ceilings.gemm_flops.items()),
    ]
    if ceilings.twin:
        lines.append("dispatch floor (the twin: same operations, minimal widths)")
        lines += [
            f"  batch {p.batch:<3} context {p.context:<5} {ms(p.forward_ns)} ms"
            for p in ceilings.twin
        ]
    return "\n".join([*lines, *ceilings.notes])


def _products(spec: ModelSpec, products: str) -> list[str]:
    """Whose rates follow: not those of the engine where it has found a faster product."""
    if spec.dtype in QUANTIZED:
        return ["matrix-vector products at the model's shapes, straight from the codes"]
    title = ["matrix-vector products at the model's shapes, by F.linear"]
    if products == "onednn":
        title.append("  (the engine uses oneDNN's here, found faster; they are not in this table)")
    return title

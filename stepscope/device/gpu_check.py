"""`make gpu-check`: what has to be seen on a real GPU. Without one it says so and exits 4."""

from __future__ import annotations

import sys

from stepscope.errors import CannotJudge


def check() -> None:
    """Raises CannotJudge where there is nothing to check, or nothing to check with."""
    try:
        import torch
    except ImportError:
        raise CannotJudge(
            f"gpu-check needs torch and {sys.executable} has none; give PYTHON=..., or run `make "
            "demo` first"
        ) from None
    if not torch.cuda.is_available():
        raise CannotJudge("gpu-check needs a CUDA device and torch sees none here; nothing was run")
    raise CannotJudge(
        f"gpu-check sees {torch.cuda.get_device_name()}, but stepscope does not run on CUDA yet; "
        "nothing was checked"
    )


def main() -> None:
    try:
        check()
    except CannotJudge as error:
        print(f"stepscope: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()

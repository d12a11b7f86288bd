"""Compiles every kernel to a folder of cubins, as the program itself would: for a machine whose NVRTC is missing.

PYTHONPATH=. python scripts/build_cubins.py OUT --arch 90
PYTHONPATH=.:cli python -m pytest -m cuda --cubins OUT
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kestrel_cuda.kernels import library
from scripts import arguments as kinds


def architecture(text: str) -> int:
    if text not in map(str, library.ARCHITECTURES):
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(map(str, library.ARCHITECTURES))}")
    return int(text)


def main() -> None:
    parser = kinds.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument(
        "--arch", type=architecture, default=90, help="compute capability without the dot (default: 90)"
    )
    args = parser.parse_args()
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"{args.out} cannot be a folder: {error.strerror}; name one that can be written")
    for name in library.kernel_files():
        if library.FEATURE_ARCHITECTURES.get(name, args.arch) != args.arch:
            continue
        cubin, _ = library.compile_cubin(name, args.arch)
        path = args.out / f"{name}.cubin"
        path.write_bytes(cubin)
        print(f"{path}: {len(cubin)} bytes")


if __name__ == "__main__":
    main()

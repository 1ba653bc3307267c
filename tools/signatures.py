"""Records the parameters of the kernels' private functions in several versions, from which tests make stand-ins.

    python tools/signatures.py FLASH_ATTENTION [WHEEL ...]

FLASH_ATTENTION is a clone of github.com/Dao-AILab/flash-attention. Each WHEEL is a wheel of torch, flash-attn-4 or
nvidia-cudnn-frontend. The records are written to tests/signatures.json. A version with the same functions as the
version before is left out.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

RECORDS = Path(__file__).parents[1] / "tests" / "signatures.json"
_OPERATORS = (
    "_flash_attention_forward", "_flash_attention_backward",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward",
    "_cudnn_attention_forward", "_cudnn_attention_backward",
)  # fmt: skip
# By module: its file, its functions, and the pattern of the tags of its versions.
_MODULES = {
    "flash_attn.flash_attn_interface": (
        "flash_attn/flash_attn_interface.py",
        {f"_flash_attn_{kind}" for kind in ("forward", "backward", "varlen_forward", "varlen_backward")},
        r"v(2\.[78]\.\d+)",
    ),
    "flash_attn_interface": (
        "hopper/flash_attn_interface.py", {"_flash_attn_forward", "_flash_attn_backward"}, r"v(2\.[78]\.\d+)",
    ),
    "flash_attn.cute.interface": (
        "flash_attn/cute/interface.py", {"_flash_attn_fwd", "_flash_attn_bwd"}, r"fa4-v(4\.0\.0\.beta\d+)",
    ),
}  # fmt: skip
# By package of a wheel: its module, and of each file what precedes the names of its functions, and these functions.
_PACKAGES = {
    "flash_attn_4": (
        "flash_attn.cute.interface", {"flash_attn/cute/interface.py": ("", {"_flash_attn_fwd", "_flash_attn_bwd"})},
    ),
    "nvidia_cudnn_frontend": (
        "cudnn.flex_attention",
        {
            "cudnn/flex_attention/plan/builder.py": ("", {"create_mask_plan"}),
            "cudnn/flex_attention/execution.py": (
                "execution.", {"_flex_attention_forward", "_flex_attention_backward"}
            ),
        },
    ),
}  # fmt: skip


def signatures(source: str, functions: set[str]) -> dict[str, str]:
    """The parameters of some functions of a file, without annotations."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name in functions:
            for parameter in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                parameter.annotation = None
            found[node.name] = ast.unparse(node.args)
    return found


def schemas(native_functions: str) -> dict[str, str]:
    """The schemas of PyTorch's operators in its native_functions.yaml."""
    lines = re.findall(r"^- func: ((\w+)\(.*)$", native_functions, re.MULTILINE)
    return {name: f"aten::{schema}" for schema, name in lines if name in _OPERATORS}


def main(repository: str, *wheels: str) -> None:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", repository, *arguments], capture_output=True, text=True, check=True).stdout

    versions: list[tuple[str, str, dict[str, str]]] = []  # module, version, signatures; oldest first
    tags = git("tag", "--sort=creatordate").split()
    for module, (file, functions, pattern) in _MODULES.items():
        for tag in tags:
            if match := re.fullmatch(pattern, tag):
                versions.append((module, match[1], signatures(git("show", f"{tag}:{file}"), functions)))
        day = git("log", "-1", "--format=%as").strip()
        versions.append((module, f"main of {day}", signatures(git("show", f"HEAD:{file}"), functions)))
    for wheel in sorted(wheels):
        package, version = Path(wheel).name.split("-")[:2]
        with zipfile.ZipFile(wheel) as files:
            if package == "torch":
                text = files.read("torchgen/packaged/ATen/native/native_functions.yaml").decode()
                versions.append(("torch", version, schemas(text)))
            else:
                module, sources = _PACKAGES[package]
                found = dict[str, str]()
                for file, (prefix, functions) in sources.items():
                    of_file = signatures(files.read(file).decode(), functions)
                    found |= {prefix + name: parameters for name, parameters in of_file.items()}
                versions.append((module, version, found))
    records: dict[str, dict[str, dict[str, str]]] = {}
    for module, version, found in versions:
        known = records.setdefault(module, {})
        if not known or found != list(known.values())[-1]:
            known[version] = found
    RECORDS.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

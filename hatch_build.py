"""Build hook: compile the CPU kernels into the wheel, or beside their sources for an editable installation.

Environment variables: ``PACKEDKV_PURE=1`` leaves the kernels out; ``PACKEDKV_ARCH=aarch64`` with a cross compiler in
``CXX`` builds for another architecture. A wheel without kernels is for any platform, and attends on CPUs with PyTorch.
"""

import os
import runpy
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CPU = "src/packedkv/kernels/cpu"
GLIBC = "2_27"
"""The kernels use symbols of glibc 2.27 at most; scripts/dist verifies this with auditwheel."""


class CustomBuildHook(BuildHookInterface):
    """Compiles before the files are gathered."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the missing kernels and set the wheel's platform tag."""
        if self.target_name != "wheel" or os.environ.get("PACKEDKV_PURE") == "1":
            return
        kernels = runpy.run_path(str(Path(self.root) / CPU / "compile.py"))
        if kernels["compiler"]() is None:
            self.app.display_warning("no C++ compiler: without CPU kernels, PyTorch attends on CPUs, which is slower")
            return
        machine = os.environ.get("PACKEDKV_ARCH", "")
        kernels["compile_missing"](machine=machine)
        build_data["artifacts"] += [
            f"{CPU}/{kernels['file_name'](variant)}" for variant in kernels["variants"](machine)
        ]
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{self._platform(kernels['architecture'](machine))}"

    @staticmethod
    def _platform(architecture: str) -> str:
        if sys.platform == "linux":
            return f"manylinux_{GLIBC}_{architecture}"
        return sysconfig.get_platform().replace("-", "_").replace(".", "_")

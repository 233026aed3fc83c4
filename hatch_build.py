"""Build hook: compile the CPU kernels into the wheel, or beside their sources for an editable installation.

Without a C++ compiler the wheel has none of them, is for any platform, and attends on CPUs with PyTorch.
"""

import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CPU = "src/packedkv/kernels/cpu"


class CustomBuildHook(BuildHookInterface):
    """Compiles before the files are gathered."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile what is missing, and name the platform that it is for."""
        kernels = runpy.run_path(str(Path(self.root) / CPU / "compile.py"))
        if kernels["compiler"]() is None:
            self.app.display_warning("no C++ compiler: without CPU kernels, PyTorch attends on CPUs, which is slower")
            return
        kernels["compile_missing"]()
        build_data["artifacts"] += [f"{CPU}/{kernels['file_name'](variant)}" for variant in kernels["variants"]()]
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"

"""Builds the optional native part; everything else about the package is in pyproject.toml.

Promises: installing never fails for want of a compiler or of libjpeg-turbo's headers. Without a compiler nothing is
built; without the headers the resize is built and JPEGs are decoded by Pillow. `drumline doctor` tells which.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = Path("src/drumline/native")
NEEDED = """
#include <stdio.h>
#include <jpeglib.h>
int main(void) {
    struct jpeg_decompress_struct info;
    JDIMENSION left = 0, columns = 0;
    info.out_color_space = JCS_EXT_RGBX;
    jpeg_crop_scanline(&info, &left, &columns);
    return (int)jpeg_skip_scanlines(&info, LIBJPEG_TURBO_VERSION_NUMBER);
}
"""


class BuildNative(build_ext):
    """Links libjpeg-turbo where a small program that uses it can be built."""

    def build_extension(self, ext: Extension) -> None:
        if self._has_turbo():
            ext.define_macros.append(("DRUMLINE_JPEG", "1"))
            ext.libraries.append("jpeg")
        else:
            self.announce("libjpeg-turbo's headers are not here: JPEGs will be decoded by Pillow", level=3)
        super().build_extension(ext)

    def _has_turbo(self) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "needed.c")
            source.write_text(NEEDED)
            try:
                objects = self.compiler.compile([str(source)], output_dir=folder)
                self.compiler.link_executable(objects, str(Path(folder, "needed")), libraries=["jpeg"])
            except Exception as error:  # each compiler class raises its own
                self.announce(f"no libjpeg-turbo to link with: {error}", level=2)
                return False
            return True


setup(
    ext_modules=[
        Extension(
            "drumline.native._core",
            sources=[str(NATIVE / name) for name in ("resample.c", "jpeg.c", "pool.c")],
            depends=[str(NATIVE / "drumline.h")],
            libraries=["m", "pthread"],
            # Contracting a*b+c would change resize weights on machines that fuse.
            extra_compile_args=[
                "-O3",
                "-std=gnu11",
                "-fvisibility=hidden",
                "-ffp-contract=off",
                "-Wno-psabi",
            ],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildNative},
)

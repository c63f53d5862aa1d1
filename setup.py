"""Maps the kernel folders into the package's namespace; everything else is in pyproject.toml.

``triton_kernels/`` and ``cutedsl_kernels/`` stand beside ``nvfp4_sgl/`` in the checkout and are installed as
``nvfp4_sgl.triton_kernels`` and ``nvfp4_sgl.cutedsl_kernels``. pyproject.toml alone would need every sub-package
listed by hand.
"""

from setuptools import find_packages, setup

KERNEL_FOLDERS = ("triton_kernels", "cutedsl_kernels")

packages = find_packages(include=["nvfp4_sgl", "nvfp4_sgl.*"])
package_dir = {"nvfp4_sgl": "nvfp4_sgl"}
for folder in KERNEL_FOLDERS:
    packages += [f"nvfp4_sgl.{name}" for name in find_packages(include=[folder, f"{folder}.*"])]
    package_dir[f"nvfp4_sgl.{folder}"] = folder

setup(packages=packages, package_dir=package_dir)

"""The entry points: off switch, registration, and that failure never passes silently."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nvfp4_sgl import plugin, process_exit
from nvfp4_sgl.errors import ConfigError

REPORT = """
import sys
from sglang.srt.plugins import load_plugins
import sglang.srt.server_args
load_plugins()
from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
from sglang.srt.arg_groups.model_override_base import _MODEL_OVERRIDE_FNS
from sglang.srt.arg_groups.resolution_hooks import _HOOKS
from sglang.srt.platforms import current_platform
from sglang.srt.plugins.hook_registry import HookRegistry
print("REPORT", {
    "platform": type(current_platform).__module__.split(".")[0],
    "backend": "nvfp4_sgl" in ATTENTION_BACKEND_CHOICES,
    "overrides": [fn.__module__.split(".")[0] for fn in _MODEL_OVERRIDE_FNS["DeepseekV4ForCausalLM"]],
    "resolution": bool(_HOOKS),
    "hooks": any(
        hook.__module__.startswith("nvfp4_sgl") for hooks in HookRegistry._hooks.values() for _, hook, _ in hooks
    ),
    "serving": any(name.startswith("nvfp4_sgl.serving") for name in sys.modules),
})
"""


def report(tmp_path: Path, **environment: str) -> dict[str, object]:
    """What a process of SGLang has registered after loading its plugins."""
    run = subprocess.run(
        [sys.executable, "-c", REPORT],
        cwd=tmp_path,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    line = next(line for line in run.stdout.splitlines() if line.startswith("REPORT "))
    return dict(eval(line.removeprefix("REPORT ")))


def test_registers_everything(tmp_path: Path) -> None:
    found = report(tmp_path)
    assert found == {
        "platform": "nvfp4_sgl",
        "backend": True,
        "overrides": ["sglang", "nvfp4_sgl"],  # ours is the last, which wins
        "resolution": True,
        "hooks": True,
        "serving": True,
    }


def test_off_switch_registers_nothing(tmp_path: Path) -> None:
    found = report(tmp_path, NVFP4_SGL_DISABLE="1")
    assert found == {
        "platform": "sglang",
        "backend": False,
        "overrides": ["sglang"],
        "resolution": False,
        "hooks": False,
        "serving": False,
    }


@pytest.mark.parametrize(("value", "disabled"), [("", False), ("0", False), ("1", True), ("yes", True)])
def test_off_switch_values(value: str, disabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(process_exit.DISABLE_VARIABLE, value)
    assert plugin.is_disabled() is disabled


def test_module_level_imports_are_the_standard_library() -> None:
    """Importing the entry points cannot fail for want of a package."""
    code = (
        "import sys, nvfp4_sgl.plugin; print(sorted({n.split('.')[0] for n in sys.modules} - sys.stdlib_module_names))"
    )
    run = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, env=_bare_environment())
    assert run.stdout.strip() == "['__main__', 'nvfp4_sgl']", run.stderr


def _bare_environment() -> dict[str, str]:
    return {"PYTHONPATH": str(Path(plugin.__file__).parents[1])}


def test_errors_of_ours_are_one_line() -> None:
    assert process_exit.describe(ConfigError("--flag: bad")) == "nvfp4-sgl: error: --flag: bad"


def test_other_errors_say_what_where_and_what_to_do() -> None:
    try:
        raise ImportError("no module named fish")
    except ImportError as error:
        text = process_exit.describe(error)
    assert "ImportError: no module named fish" in text and __file__ in text and "NVFP4_SGL_DISABLE=1" in text


def test_stop_ends_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        process_exit.stop(ConfigError("bad"))
    assert caught.value.code == process_exit.EXIT_CODE != 0
    assert capsys.readouterr().err == "nvfp4-sgl: error: bad\n"

"""``manage.py doctor --gpu``, with a driver's programs that say what they would on other hosts."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command

from inference_site.catalogue.catalogue import DEMO_FILE, Catalogue
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.ops.doctor import gpu
from inference_site.ops.doctor.checks import Finding

H100 = "NVIDIA H100 80GB HBM3, 81559, 80990, 9.0"
GTX = "NVIDIA GeForce GTX 1070, 8192, 7000, 6.1"
Host = Callable[..., None]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """Sets what ``nvidia-smi`` says, and what the installed llama.cpp sees."""

    def make(*gpus: str, cuda: str = "12.8", sees: list[gpu.Gpu] | None = None) -> None:
        if gpus:
            program = tmp_path / "nvidia-smi"
            rows = "\n".join(gpus)
            program.write_text(
                "#!/bin/sh\n"
                f"case \"$1\" in --query*) echo '{rows}' ;;\n"
                f"*) echo '| NVIDIA-SMI 570  Driver Version: 570  CUDA Version: {cuda} |' ;; esac\n"
            )
            program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setattr(gpu, "library_gpus", lambda: sees)

    return make


@pytest.fixture(autouse=True)
def models(monkeypatch: pytest.MonkeyPatch) -> None:
    """A catalogue of the demo model, on all layers and on eight of its seven."""
    specs = [ModelSpec(id_, "llama_cpp", DEMO_FILE, gpu_layers=n) for id_, n in _LAYERS.items()]
    known = Catalogue(specs)
    monkeypatch.setattr(gpu, "catalogue", lambda: known)


_LAYERS = {"all": -1, "named": 8, "none": 0}


def found() -> dict[str, Finding]:
    return {finding.what: finding for finding in gpu.check_gpus()}


def test_a_gpu_that_the_wheel_does_not_see_needs_the_wheel_of_its_cuda(host: Host) -> None:
    host(H100, sees=[])
    findings = found()
    assert "80GB HBM3" in findings["GPU 0"].found
    assert "79.1 of 79.6 GiB free" in findings["GPU 0"].found
    assert findings["driver"].level == "ok"
    assert findings["llama.cpp"].level == "fail"
    assert (
        "--index-url https://xorbitsai.github.io/xllamacpp/whl/cu128" in findings["llama.cpp"].fix
    )
    assert "xllamacpp==" in findings["llama.cpp"].fix, "the version that is locked"


@pytest.mark.parametrize(
    ("gpus", "cuda", "wheel"),
    [
        ([H100], "13.2", "cu132"),
        ([H100], "13.0", "cu128"),
        ([H100, GTX], "13.2", "cu128"),
        ([GTX], "12.4", ""),
    ],
)
def test_the_wheel_fits_the_driver_and_the_oldest_gpu(
    host: Host, gpus: list[str], cuda: str, wheel: str
) -> None:
    host(*gpus, cuda=cuda)
    assert gpu.cuda_wheel(gpu.nvidia_gpus()) == wheel


def test_a_driver_that_is_too_old_is_a_failure_with_two_ways_out(host: Host) -> None:
    host(GTX, cuda="11.4", sees=[])
    driver = found()["driver"]
    assert driver.level == "fail"
    assert "update the driver" in driver.fix
    assert "whl/vulkan" in driver.fix


def test_layers_are_counted_with_what_is_free(host: Host) -> None:
    host(H100, sees=[gpu.Gpu("NVIDIA H100", 80 * 2**30, 79 * 2**30)])
    assert "7 of 7 layers fit" in found()["all"].found
    host("NVIDIA T400, 2048, 560, 7.5", sees=[gpu.Gpu("NVIDIA T400", 2**31, 2**29)])
    findings = found()
    assert findings["all"].level == "warn", "llama.cpp takes as many as fit"
    assert findings["named"].level == "fail", "the entry asks for more than fit"
    assert findings["none"].level == "ok"
    assert "gpu_layers: " in findings["all"].fix


def test_a_gpu_of_another_maker_is_known_by_what_llama_cpp_sees(host: Host) -> None:
    host(sees=[gpu.Gpu("Intel Arc A770", 16 * 2**30, 15 * 2**30)])
    findings = found()
    assert findings["llama.cpp"].level == "ok"
    assert "Intel Arc A770" in findings["llama.cpp"].found
    assert "7 of 7 layers fit" in findings["all"].found


def test_a_build_of_the_servers_own_is_asked_what_it_sees(
    host: Host, settings: Any, tmp_path: Path
) -> None:
    program = tmp_path / "llama-server"
    settings.LLAMA_SERVER = f"{program} --threads-http 4"
    host("NVIDIA H200, 143771, 143000, 9.0", cuda="11.0")
    assert found()["llama.cpp"].level == "fail", "there is no such program"
    device = "  CUDA0: NVIDIA H200 (143771 MiB, 143000 MiB free)"
    program.write_text(f"#!/bin/sh\necho 'Available devices:'\necho '{device}'\n")
    program.chmod(0o755)
    findings = found()
    assert findings["llama.cpp"].level == findings["driver"].level == "ok"
    assert "LLAMA_SERVER sees NVIDIA H200" in findings["llama.cpp"].found
    assert "7 of 7 layers fit" in findings["all"].found
    program.write_text("#!/bin/sh\necho 'Available devices:'\n")
    assert found()["llama.cpp"].level == "fail", "it was built for the CPU"


def test_without_a_gpu_everything_runs_on_the_cpu(
    host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu, "_ROCM_VERSION", tmp_path / "none")
    host(sees=[])
    findings = found()
    assert {name: finding.level for name, finding in findings.items()} == {
        "driver": "warn",
        "llama.cpp": "warn",
    }


@pytest.mark.parametrize(
    ("installed", "wheel"),
    [("7.2.4-81", "rocm-7.2.4"), ("6.4.3", "rocm-6.4.1"), ("6.0.2", ""), ("", "")],
)
def test_the_wheel_fits_the_rocm_that_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, installed: str, wheel: str
) -> None:
    (tmp_path / "version").write_text(installed)
    monkeypatch.setattr(gpu, "_ROCM_VERSION", tmp_path / "version")
    assert gpu.rocm_wheel() == wheel


def test_the_devices_of_the_installed_wheel_are_read_in_another_process() -> None:
    assert gpu.library_gpus() == [], "the locked wheel is that for CPUs"


def test_the_command_says_what_comes_next(
    host: Host, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    host(H100, sees=[gpu.Gpu("NVIDIA H100", 80 * 2**30, 79 * 2**30)])
    with pytest.raises(SystemExit) as ended:
        call_command("doctor", gpu=True)
    text = capsys.readouterr().out
    assert ended.value.code == 0, text
    assert "docs/gpu.md from step 4" in text
    host(H100, sees=[])
    with pytest.raises(SystemExit) as ended:
        call_command("doctor", gpu=True)
    assert ended.value.code == 1

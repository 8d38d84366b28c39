"""`drumline.guard` on a GPU: mixed precision, the loss scaler and captured steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import drumline
from tests.guards.test_delayed import Middle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def made() -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = drumline.create_model("resnet8", classes=10).cuda().to(memory_format=torch.channels_last)
    return model, torch.randn(16, 3, 32, 32, device="cuda"), torch.arange(16, device="cuda") % 10


@pytest.mark.parametrize("fused", [False, True])
def test_a_bad_batch_under_autocast_is_named_and_kept(tmp_path: Path, fused: bool) -> None:
    model, x, y = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=fused)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()

    with drumline.guard(model, optimizer, folder=tmp_path):
        for _ in range(3):
            step()
        x[3, 1, 2, 2] = torch.nan
        step()  # reported one step later, so that the GPU need not wait
        with pytest.raises(drumline.GuardError, match="gradients of step 4 are not finite: the batch itself"):
            step()
    kept = load_file(tmp_path / "step-4-rank-0.safetensors")["call0.input0"]
    assert torch.equal(kept.isnan(), x.isnan().cpu())
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())


def test_a_gradient_that_is_not_finite_is_named_one_step_later(tmp_path: Path) -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.Linear(4, 4), Middle(), torch.nn.Linear(4, 2)
    ).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    x = torch.randn(8, 3, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    with drumline.guard(model, optimizer, folder=tmp_path):
        model[2].on = False
        for _ in range(4):
            step()
        model[2].on = True
        step()
        with pytest.raises(
            drumline.GuardError, match=r"gradients of step 5 are not finite: .* in backward, .* '1\.bias'"
        ):
            step()


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_the_loss_scaler_skips_are_normal(fused: bool, capsys: pytest.CaptureFixture[str]) -> None:
    model, x, y = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    with drumline.guard(model, optimizer):
        for step in range(6):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y) * (torch.inf if step in (0, 3) else 1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() == 1.0
    assert capsys.readouterr().err == ""


def test_a_captured_step_is_not_watched() -> None:
    model, x, y = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    with drumline.guard(model, optimizer):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(4):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for _ in range(3):
            graph.replay()
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())

"""The fused path on several ranks and for speculative verification, against the oracle on the whole model.

Each test runs two processes with vLLM's real sharding, loader, groups and all-reduce. Float32 contracts replace the
kernels. The tests detect errors between kernels: a missing or repeated sum, a bias added by every rank, heads or sinks
of another rank, rejected drafts that stay in the cache, and a KV connector that is not notified.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import checkpoint, reference, shapes
from tests.engine.model import ranks
from tests.support import warm_vllm, whole_model
from vllm_gptoss.cli.bench.worker import free_port

SHAPE = dataclasses.replace(shapes.TINY, layers=4, vocabulary=512)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("random") / "model"
    checkpoint.write(SHAPE, directory)
    return directory


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Normed hidden states and `ranks.AUX` states of every request, in float64."""
    oracle = whole_model.load(model, torch.float64)
    found = []
    for tokens in ranks.sequences(SHAPE.vocabulary):
        x, aux = oracle.embedding[tokens], []
        for index, layer in enumerate(oracle.layers, 1):
            x = reference.block(x, layer, oracle.config)
            aux += [x] if index in ranks.AUX else []
        found.append((reference.rms_norm(x, oracle.norm, oracle.config.rms_norm_eps), torch.stack(aux)))
    return found


def run(layout: str, model: Path, out: Path, world: int = 2) -> list[dict[str, Any]]:
    port = free_port()
    environment = {**os.environ, "VLLM_PLUGINS": "gptoss", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment["VLLM_DIST_IDENT"] = str(port)  # a launcher's part: what the ranks' shared memory is called
    logs = [Path(f"{out}-{rank}.log") for rank in range(world)]
    processes = []
    for rank, log in enumerate(logs):
        command = [sys.executable, "-m", "tests.engine.model.ranks", layout, rank, world, port, model, out]
        with log.open("wb") as said:
            words = [str(part) for part in command]
            processes.append(warm_vllm.popen(words, env=environment, stdout=said, stderr=subprocess.STDOUT))
    assert [process.wait(300) for process in processes] == [0] * world, [log.read_text()[-3000:] for log in logs]
    return [torch.load(path) for path in sorted(out.parent.glob(f"{out.name}.*"))]


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


def test_tensor_parallel_ranks_and_verified_drafts_give_the_whole_models_answer(
    model: Path, wanted: list[tuple[torch.Tensor, torch.Tensor]], tmp_path: Path
) -> None:
    found = run("tensor", model, tmp_path / "out")
    assert len(found) == 2
    for rank in found:
        for hidden, aux, (wanted_hidden, wanted_aux) in zip(rank["hidden"], rank["aux"], wanted, strict=True):
            assert distance(hidden, wanted_hidden) < 1e-5
            assert distance(aux, wanted_aux) < 1e-5
        # bfloat16 throughout, and vLLM rounds the router's logits
        assert rank["distance"] < 2e-2
        # a KV connector had the cache of each layer between the steps
        assert rank["saved"] == len(list(ranks.plan())) * SHAPE.layers
    assert all(torch.equal(a, b) for a, b in zip(found[0]["hidden"], found[1]["hidden"], strict=True))


def test_pipeline_ranks_hand_on_what_the_next_one_needs(
    model: Path, wanted: list[tuple[torch.Tensor, torch.Tensor]], tmp_path: Path
) -> None:
    [last] = run("pipeline", model, tmp_path / "out")
    for hidden, (wanted_hidden, _) in zip(last["hidden"], wanted, strict=True):
        assert distance(hidden, wanted_hidden) < 1e-5

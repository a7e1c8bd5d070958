"""The decisions: the first row of a family that nothing hinders, with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from vllm_gptoss.engine.choose import bands, families, measured
from vllm_gptoss.engine.choose.deployment import Deployment
from vllm_gptoss.engine.choose.device import Device
from vllm_gptoss.engine.choose.families import Row
from vllm_gptoss.engine.spec import ModelSpec
from vllm_gptoss.settings import ChoiceError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Choice(Generic[T]):
    """A decision and why it was made. `str()` is what logs and doctor print."""

    value: T
    reason: str

    def __str__(self) -> str:
        return f"{self.value} ({self.reason})"


def experts(device: Device, deployment: Deployment, wish: str = "auto") -> Choice[str]:
    """The MXFP4 expert kernel: a value of `Family.experts`. The plugin implements `gptoss`, `native` and `dequantize`.

    Raises:
        ChoiceError: the requested kernel cannot run here, or the experts do not divide over the ranks.
    """
    if deployment.moe_backend != "auto":
        return Choice("upstream", f"--moe-backend {deployment.moe_backend} was asked for")
    count, ranks = deployment.model.experts, deployment.tensor_parallel
    if deployment.expert_parallel and count % ranks:
        raise ChoiceError(f"{count} experts do not divide over {ranks} expert-parallel ranks")
    return _pick("experts", families.of(device).experts, device, deployment, wish)


def layers(device: Device, deployment: Deployment, wish: str = "auto") -> Choice[str]:
    """The implementation of a step of few tokens: `gptoss` for our fused layers, or `upstream`.

    Raises:
        ChoiceError: `gptoss` was requested and cannot run here.
    """
    return _pick("layers", families.of(device).layers, device, deployment, wish)


def one_token(device: Device, deployment: Deployment, wish: str = "auto") -> Choice[str]:
    """How the fused layers run a step of one token: `one launch` or `six launches`.

    wish: that of the layers. More GPUs than were measured require `gptoss`.
    """
    choice = _pick("one token", families.of(device).one_token, device, deployment, "auto")
    summed = all_reduce(deployment, wish)
    several = choice.value == bands.ONE_LAUNCH and summed.value == bands.UPSTREAM
    return Choice(bands.SIX_LAUNCHES, summed.reason) if several else choice


def many_tokens(device: Device, deployment: Deployment, wish: str = "auto") -> Choice[str]:
    """The layers of a decode step of more tokens than the fused ones take: `around cuBLAS` or `upstream`.

    wish: that of the layers. More GPUs than were measured require `gptoss`.
    """
    choice = _pick("many tokens", families.of(device).many_tokens, device, deployment, "auto")
    summed = all_reduce(deployment, wish)
    return summed if choice.value == bands.AROUND_CUBLAS and summed.value == bands.UPSTREAM else choice


def all_reduce(deployment: Deployment, wish: str = "auto") -> Choice[str]:
    """What sums over the tensor-parallel ranks in the fused layers: `push`, if all ranks can connect, or `upstream`.

    wish: that of the layers. More GPUs than were measured require `gptoss`.
    """
    ranks = deployment.tensor_parallel
    if ranks not in measured.SM90.push_ranks and wish != "gptoss":
        return Choice(bands.UPSTREAM, f"never run by us with {ranks} GPUs; layers=gptoss tries it")
    if deployment.pipeline_parallel > 1:
        return Choice(bands.UPSTREAM, "a pipeline shares the model: never run by us")
    if ranks > 1 and not deployment.custom_all_reduce:
        return Choice(bands.UPSTREAM, "--disable-custom-all-reduce was given")
    return Choice("push", "each rank stores its addend into its peers' memory")


def tokens_per_request(device: Device, deployment: Deployment, wish: str = "auto") -> Choice[int]:
    """Most tokens of one request in steps of 17 to 512 tokens, as drafts have them, that are not vLLM's.

    wish: that of the layers. More than `measured.SM90` has requires `gptoss`.
    """
    drafts, most = deployment.draft_tokens, bands.MOST_PER_REQUEST
    if drafts == 0:
        return Choice(1, "no drafts")
    layers = many_tokens(device, deployment, wish)
    if layers.value != bands.AROUND_CUBLAS:
        return Choice(1, layers.reason)
    if drafts >= most:
        return Choice(1, f"{drafts} drafts are more than {most - 1}")
    several = " on several GPUs" * (deployment.tensor_parallel > 1)
    if (several or drafts >= measured.SM90.tokens_per_request) and wish != "gptoss":
        return Choice(1, f"never run by us with {drafts} drafts{several}; layers=gptoss tries it")
    return Choice(1 + drafts, f"drafts among them: {drafts}")


def runner(device: Device, deployment: Deployment, wish: str = "auto") -> Choice[str]:
    """What prepares and samples decode steps: `gptoss` replays them, else `upstream`.

    Drafts, and KV connectors and numbers of GPUs that `measured.SM90` lacks, require the wish `gptoss`.

    Raises:
        ChoiceError: `gptoss` was requested and cannot run here.
    """
    choice = _pick("host", families.of(device).runner, device, deployment, "auto")
    if choice.value != "gptoss" and wish == "gptoss":  # `upstream` is no value of this setting
        raise ChoiceError(f"host=gptoss cannot run here: {choice.reason.rpartition('not gptoss: ')[2]}; use host=auto")
    ranks = deployment.tensor_parallel
    several = f"{ranks} GPUs" if ranks not in measured.SM90.host_ranks else None
    compared = measured.SM90.host_kv_connectors if ranks == 1 else ()
    connected = "a KV connector" if set(deployment.kv_connectors) - set(compared) else several
    never = "drafts" if deployment.drafts else connected
    if choice.value == "gptoss" and never and wish != "gptoss":
        return Choice("upstream", f"not gptoss: never compared with vLLM's runner with {never}; host=gptoss tries it")
    return choice


def attention(device: Device, deployment: Deployment) -> Choice[str]:
    """The backend for attention with sinks: what vLLM has built, else what it is expected to build.

    Raises:
        ChoiceError: the heads do not divide over the ranks.
    """
    heads, ranks = deployment.model.query_heads, deployment.tensor_parallel
    if deployment.attention_backend is not None:
        return Choice(deployment.built_attention or deployment.attention_backend, "--attention-backend was given")
    if heads % ranks:
        raise ChoiceError(f"{heads} query heads do not divide over {ranks} tensor-parallel ranks")
    expected = _pick("attention", families.of(device).attention, device, deployment, "auto")
    if deployment.built_attention in (None, expected.value):
        return expected
    return Choice(deployment.built_attention or "", "vLLM's own choice")


def kv_cache_dtype(device: Device, wish: str = "auto") -> Choice[str]:
    """The KV cache's dtype. `auto` is BF16, as trained; other types are lossy and must be requested.

    Raises:
        ChoiceError: no attention backend of this family reads the requested type with sinks.
    """
    if wish in ("auto", "bfloat16"):
        return Choice(wish, "exact")
    family = families.of(device)
    why = next((why for name, why in family.kv_cache.items() if wish.startswith(name)), None)
    if why is None and family is not families.OTHER:
        there = ", ".join(["auto", "bfloat16", *family.kv_cache])
        raise ChoiceError(f"kv-cache-dtype {wish!r}: no attention with sinks reads it on {device}; there are {there}")
    return Choice(wish, f"asked for; {why or 'vLLM decides'}")


def tensor_parallel(device: Device, spec: ModelSpec) -> Choice[int]:
    """How many GPUs to shard over: a recommendation that doctor and recipes print; nothing enforces it."""
    need = spec.weight_gib * 1.1 + 4.0  # activations, CUDA graphs and a KV cache worth having
    sizes = [n for n in (1, 2, 4, 8) if n <= device.count]
    fitting = next((n for n in sizes if need / n <= device.memory_gib * 0.92), None)
    if device.vendor == "cpu":
        return Choice(1, "one process uses all cores")
    if fitting is None:
        tight = f"{spec.name} needs about {need:.0f} GiB, {device.count} x {device.memory_gib:.0f} GiB are here"
        return Choice(sizes[-1], f"{tight}: `vllm-gptoss recipe plan` lists what would fit")
    if device.arch == "sm90" and spec.experts > 32 and fitting == 1 and device.count >= 2:
        return Choice(2, "on two H200, 256 requests get 1.4 times the tokens of two servers with one GPU each")
    return Choice(fitting, "the fewest that hold the weights and a useful KV cache")


def available(rows: Sequence[Row], device: Device, deployment: Deployment) -> list[str]:
    """All values of `rows` that can be requested, always including `upstream`."""
    names = [row.value for row in rows if _obstacle(row, device, deployment) is None]
    return list(dict.fromkeys([*names, "upstream"]))


def _pick(what: str, rows: Sequence[Row], device: Device, deployment: Deployment, wish: str) -> Choice[str]:
    if wish == "upstream":
        return Choice("upstream", f"{what}=upstream was asked for")
    if wish != "auto":
        return _wished(what, rows, device, deployment, wish)
    passed: list[str] = []
    for row in rows:
        if row.by_wish_only:
            continue
        why = _obstacle(row, device, deployment)
        if why is None and (untried := _untried(row, device, deployment)):
            why = f"{untried}; {what}={row.value} tries it"
        if why is None:
            return Choice(row.value, "; ".join([row.reason, *passed]))
        passed.append(f"not {row.value}: {why}")
    return Choice("upstream", "; ".join(["vLLM's own choice", *passed]))


def _wished(what: str, rows: Sequence[Row], device: Device, deployment: Deployment, wish: str) -> Choice[str]:
    row = next((row for row in rows if row.value == wish), None)
    why = f"it is not made for {device}" if row is None else _obstacle(row, device, deployment)
    if row is not None and why is None:
        untried = _untried(row, device, deployment)
        return Choice(wish, f"asked for; {row.reason}" + (f"; {untried}" if untried else ""))
    there = ", ".join(available(rows, device, deployment))
    raise ChoiceError(f"{what}={wish!r} cannot run here: {why}. On this machine there are: {there}")


def _obstacle(row: Row, device: Device, deployment: Deployment) -> str | None:
    return next(filter(None, (condition(device, deployment) for condition in row.unless)), None)


def _untried(row: Row, device: Device, deployment: Deployment) -> str | None:
    found = next(filter(None, (condition(device, deployment) for condition in row.untried)), None)
    return f"never run by us with {found}" if found else None

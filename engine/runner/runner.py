"""Runs planned steps on the model: inputs up, forward pass, tokens chosen, ids on their way back."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from engine.attention import BACKENDS, AttentionBackend, AttentionMetadata, GroupTables
from engine.ledger import Footprint
from engine.model_shape import ModelShape
from engine.models import BridgedModel, CompiledExecutor, Executor, FusedDecoder, LayerCaches, TraceableExecutor
from engine.requests import Request
from engine.resolution import ResolvedConfig
from engine.runner.batch import BatchState, StepShape
from engine.runner.buckets import MIXED_TOKENS, StepBuckets, decode_sizes, mixed_decodes
from engine.runner.footprint import CudaAllocator, FootprintMeter, measure_activations
from engine.runner.graphs import StepGraphs
from engine.runner.host_blocks import HostStore, Transfer
from engine.runner.kv_tensors import allocate_kv
from engine.runner.launch_time import LaunchTime, ReplayLimit, replay_limit
from engine.runner.launched_step import LaunchedStep, record_event
from engine.runner.staging import Returns, Staging
from engine.sampling import Choice, Sampler
from engine.scheduler import StepPlan, StepRows

logger = logging.getLogger(__name__)


class RowTables(Sequence[Sequence[int]]):
    """One layer group's block tables by row, looked up where they are."""

    def __init__(self, requests: Sequence[Request], group: int) -> None:
        self._requests, self._group = requests, group

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, row: Any) -> Any:
        return self._requests[row].tables[self._group]


class ModelRunner:
    """Owns what lives on the device: the cache, the last token of each slot, the captured graphs.

    Args:
        model: a transformers causal LM in eval mode.
        shape: its sizes.
        config: resolved settings.

    Attributes:
        graphs: captured steps, once `warm_up` is over; None without any.
        replay_limit: the largest of them that has prefills, and why; None where none has.
    """

    def __init__(self, model: Any, shape: ModelShape, config: ResolvedConfig) -> None:
        self.model, self.shape, self.config = model, shape, config
        self.device = shape.device
        self._meter = FootprintMeter(CudaAllocator(self.device)) if self.device.type == "cuda" else None
        self.footprint: Footprint | None = None
        backend = self._backend = BACKENDS[config.attention_backend]()
        self._all_varlen = backend.decode_kernel and not config.decode_kernel  # max_blocks_per_request=0
        caches = allocate_kv(config.layout, config.num_blocks, shape.dtype, self.device)
        self.executor: Executor = _make_executor(model, shape, config, backend, caches)
        self.compile_s: float | None = None
        self.layer_caches = caches
        # Layers of different groups share tensors; each is here once.
        self._stores = list({store.data_ptr(): store for _, *pair in caches for store in pair}.values())
        self.host = HostStore(self._stores, config.num_host_blocks) if config.num_host_blocks else None
        self.windows = [group.window for group in config.layout.groups]
        self.batch = BatchState(config.layout, config.max_requests_per_batch)
        self.last_token = torch.zeros(config.max_requests_per_batch + 1, dtype=torch.int64, device=self.device)
        self.sampler = Sampler(self.device, config.return_logprobs)
        on_gpu = self.device.type == "cuda"
        self._staging = Staging() if on_gpu else None
        self._returns = Returns(config.max_requests_per_batch) if on_gpu else None
        self._addresses = {name: p.data_ptr() for name, p in model.named_parameters()}
        self.graphs: StepGraphs | None = None
        self.replay_limit: ReplayLimit | None = None

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile and load what the first steps would otherwise wait for; capture graphs."""
        if isinstance(self.executor, CompiledExecutor) and self.compile_s is None:
            self.compile_s = self.executor.warm_up(self._padding_row())
        if self.device.type == "cuda":
            self.sampler.warm_up(self.shape.vocab_size, self.shape.dtype, self.device)
        if any(self.config.use_cuda_graph) and self.graphs is None:
            buckets = self.buckets()
            if buckets.mixed_tokens:
                self.replay_limit = self._replay_limit(buckets)
                buckets = buckets.up_to(self.replay_limit.tokens)
            self.capture(buckets)
        if self.device.type == "cuda" and self._backend.capturable:
            self._rehearse()
        if self._meter is not None:
            self.footprint = self._measure(self._meter)

    def _measure(self, meter: FootprintMeter) -> Footprint:
        activations = measure_activations(self, meter) if self._backend.capturable else None
        pool, reused = (None, None) if self.graphs is None else (self.graphs.pool_bytes, self.graphs.pool_reused)
        return meter.footprint(self.config.ledger.kv_cache, activations, pool, reused)

    @torch.inference_mode()
    def capture(self, buckets: StepBuckets) -> None:
        """Capture steps of these sizes, in the place of those captured before."""
        self.graphs, tuned = None, self.executor.tuned
        # Compiled paths have products of their own: no numbers of rows are tuned beforehand then.
        largest = 0 if isinstance(self.executor, CompiledExecutor) else buckets.largest
        with nullcontext() if tuned is None else tuned.learning(largest):
            self.graphs = StepGraphs(self, buckets)
        self.release_unused()  # what steps needed that have memory of their own now

    def _rehearse(self) -> None:
        """Run steps that no graph is for, on padding: their kernels are compiled and loaded before a request waits."""
        largest = self.config.max_batch_tokens
        steps = [(decodes, 1, max(n - decodes, 1)) for n in (largest // 4, largest // 2, largest) for decodes in (0, 1)]
        # Kernels of decode rows have other tiles for other numbers of rows.
        if self.graphs is None or not self.graphs.buckets.decodes:
            steps += [(rows, 0, 0) for rows in decode_sizes(min(self.config.max_requests_per_batch, largest))]
        for decodes, prefills, tokens in steps:
            try:
                self._run_padding(StepShape(decodes, prefills, tokens, 1, 1, len(self.windows)))
            except torch.OutOfMemoryError as error:  # such a step will be made smaller when it comes
                logger.warning(
                    "a step of %d tokens does not fit into memory (%s): lower max_batch_tokens or num_blocks",
                    decodes + tokens,
                    str(error).partition("\n")[0],
                )
                self.release_unused()

    def _run_padding(self, shape: StepShape) -> LaunchTime:
        """Launch a step of padding and wait for it."""
        views = shape.carve(self.upload(shape, StepRows.none()))
        self.synchronize()
        started = time.perf_counter()
        self.forward(shape, views, self.padding_metadata(shape, views))
        launched = time.perf_counter()
        self.synchronize()
        return LaunchTime(shape.tokens, launched - started, time.perf_counter() - started)

    def _replay_limit(self, buckets: StepBuckets) -> ReplayLimit:
        """Up to which size steps with prefills are to be captured. Padding has no keys, so the device's part is
        understated by attention."""

        def measure(tokens: int) -> LaunchTime | None:
            decodes = mixed_decodes(tokens, self.config.max_requests_per_batch)[0]
            shape = buckets.mixed(tokens, decodes, 1)
            try:
                self._run_padding(shape)  # compiles and loads
                return self._run_padding(shape)
            except torch.OutOfMemoryError:
                self.release_unused()
                return None

        always = max(MIXED_TOKENS[-1], self.config.q_padding_interval_size)
        return replay_limit(buckets.mixed_tokens, always, measure)

    def padding_metadata(self, shape: StepShape, views: dict[str, torch.Tensor]) -> AttentionMetadata:
        """Attention metadata of a step of any rows that fit the shape, as far as the host knows them."""
        return AttentionMetadata(
            num_decode=shape.decodes,
            kv_lengths=views["kv_lengths"],
            groups=self.group_tables(views),
            cu_query=views["cu_query"] if shape.prefills else None,
            cu_kv=views["cu_kv"] if shape.prefills else None,
            max_query=shape.tokens if shape.prefills else 0,
            max_kv=shape.width * self.config.page_size,
        )

    def _padding_row(self) -> AttentionMetadata:
        """A step of one decode row that touches the trash block only."""
        shape = StepShape(1, 0, 0, 1, 1, len(self.windows))
        views = shape.carve(self.upload(shape, StepRows.none()))
        return AttentionMetadata(
            num_decode=1,
            kv_lengths=views["kv_lengths"],
            groups=self.group_tables(views),
            host_kv_lengths=[1],
            host_tables=tuple([[0]] for _ in self.windows),
        )

    def buckets(self) -> StepBuckets:
        """Sizes of steps that could be captured, whether or not it pays."""
        config = self.config
        varlen, decode = config.use_cuda_graph
        return StepBuckets.plan(
            max_rows=config.max_requests_per_batch,
            max_tokens=config.max_batch_tokens,
            table_pages=config.table_pages,
            page_size=config.page_size,
            groups=len(self.windows),
            mixed=varlen,
            decode=decode if config.decode_kernel else varlen,  # without the kernel decode steps are varlen steps
            any_lengths=self._backend.any_lengths,
            q_interval=config.q_padding_interval_size,
            kv_interval=config.kv_padding_interval_size,
        )

    @torch.inference_mode()
    def transfer(self, plan: StepPlan) -> Transfer | None:
        """Start the copies to and from the host that must come before the plan's step; None if there are none."""
        if not (plan.offloads or plan.restores):
            return None
        assert self.host is not None, "only a scheduler with host blocks plans such copies"
        return self.host.transfer(plan.offloads, plan.restores)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a planned step. On a GPU this returns before the step has run."""
        begun = record_event(self.device)
        rows, sampled = plan.rows, plan.rows.sampled()
        width = self.batch.follow(rows)
        tokens, decodes, samples = int(rows.counts.sum()), rows.num_single, len(sampled)
        shape = StepShape(decodes, len(rows) - decodes, tokens - decodes, max(samples, 1), width, len(self.windows))
        captured = None if self.graphs is None else self.graphs.find(shape)
        if captured is not None:
            self.upload(captured.shape, rows, captured.inputs)
            captured.graph.replay()
            sample_slots, logits, greedy = captured.sample_slots, captured.logits, captured.greedy[:samples]
            padded, masks = captured.shape.tokens - tokens, 0  # what can be captured needs none
        else:
            views = shape.carve(self.upload(shape, rows))
            metadata = self._metadata(shape, views, rows)
            sample_slots, logits = views["sample_slots"], self.forward(shape, views, metadata)
            padded, greedy, masks = 0, None, self._backend.mask_bytes(metadata)
        choice = self._choose(logits[:samples], sampled, sample_slots[:samples], greedy)
        if plan.copies:
            self.copy_blocks(plan.copies)
        choice, event = self._returns.send(choice) if self._returns is not None and samples else (choice, None)
        return LaunchedStep(
            sampled,
            choice,
            event,
            padded_rows=padded,
            table_pages=width if captured is None else captured.shape.width,
            decode_kernel_rows=decodes if self.config.decode_kernel else 0,
            replayed=captured is not None,
            mask_bytes=masks,
            begun=begun,
        )

    def _metadata(self, shape: StepShape, views: dict[str, torch.Tensor], rows: StepRows) -> AttentionMetadata:
        """Attention metadata of a step that is launched kernel by kernel."""
        prefills = rows.counts[shape.decodes :].tolist()
        lengths = rows.ends.tolist()
        return AttentionMetadata(
            num_decode=shape.decodes,
            kv_lengths=views["kv_lengths"],
            groups=self.group_tables(views),
            cu_query=views["cu_query"] if prefills else None,
            cu_kv=views["cu_kv"] if prefills else None,
            max_query=max(prefills, default=0),
            max_kv=max(lengths[shape.decodes :], default=0),
            host_kv_lengths=lengths,
            host_query_lengths=prefills,
            host_tables=tuple(RowTables(rows.requests, group) for group in range(len(self.windows))),
        )

    def forward(self, shape: StepShape, views: dict[str, torch.Tensor], metadata: AttentionMetadata) -> torch.Tensor:
        """Logits [samples, vocabulary] of the step described by ``views``, in order of its sampled rows."""
        ids = views["ids"]
        if shape.decodes:
            decode = ids[: shape.decodes]
            resolved = torch.where(decode < 0, self.last_token[views["slots"][: shape.decodes]], decode)
            ids = torch.cat((resolved, ids[shape.decodes :])) if shape.prefills else resolved
        if self._all_varlen:
            metadata = metadata.as_varlen()
        return self.executor.logits(ids, views["positions"], metadata, views["sample_index"])

    def measured_settings(self) -> list[tuple[str, Any, str]]:
        """(name, value, source) of what `warm_up` decided by timing."""
        tuned, limit = self.executor.tuned, self.replay_limit
        rows: list[tuple[str, Any, str]] = []
        if tuned is not None:
            rows.append(("linear_kernels", str(tuned.report()), "derived: fastest on this device"))
        if limit is not None:
            rows.append(("replayed_mixed_tokens", limit.tokens, limit.reason))
        return rows

    def synchronize(self) -> None:
        """Wait until the device has done all it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def replaced_parameters(self) -> list[str]:
        """Parameters that are no longer where they were when the runner was made."""
        now = {name: p.data_ptr() for name, p in self.model.named_parameters()}
        return [name for name, address in self._addresses.items() if now.get(name) != address]

    def refuse_replaced_parameters(self) -> None:
        """Raise RuntimeError if a parameter is no longer where fused and captured steps read it."""
        if not (self.config.use_fused_forward or self.graphs):
            return
        replaced = self.replaced_parameters()
        if replaced:
            raise RuntimeError(
                f"{len(replaced)} parameters, {replaced[0]} among them, were replaced; write to them in place "
                "(copy_, load_state_dict): the engine goes on with the old ones"
            )

    @torch.inference_mode()
    def refresh(self) -> None:
        """The model's parameters were written to in place."""
        self.executor.refresh()

    def release_unused(self) -> None:
        """Give memory that no tensor uses back to the device: what is free in pieces may be enough in one."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Leave the model as it was found; the runner is not used again."""
        self.executor.close()
        if self.host is not None:
            self.host.close()

    def group_tables(self, views: dict[str, torch.Tensor]) -> tuple[GroupTables, ...]:
        tables, kv_slots = views["tables"], views["kv_slots"]
        return tuple(GroupTables(tables[g], kv_slots[g], window) for g, window in enumerate(self.windows))

    def upload(self, shape: StepShape, rows: StepRows, target: torch.Tensor | None = None) -> torch.Tensor:
        """Pack a step's inputs and bring them to the device, into ``target`` if given; returns where they are."""
        if self._staging is None:
            host = np.empty(shape.size, dtype=np.int32)
            self.batch.fill(shape, shape.carve(host), rows)
            packed = torch.from_numpy(host)
            return packed if target is None else target[: shape.size].copy_(packed)
        pinned, views = self._staging.take(shape)
        self.batch.fill(shape, views, rows)
        if target is None:
            target = torch.empty(shape.size, dtype=torch.int32, device=self.device)
        target[: shape.size].copy_(pinned, non_blocking=True)
        self._staging.copied()
        return target

    def greedy(self, logits: torch.Tensor, views: dict[str, torch.Tensor]) -> torch.Tensor:
        """Most likely tokens [samples] of a step's ``views``, which become its slots' last tokens."""
        return self.sampler.greedy(logits, views["sample_slots"], self.last_token)

    def _choose(self, logits: torch.Tensor, rows: StepRows, slots: torch.Tensor, greedy: torch.Tensor | None) -> Choice:
        if not len(rows):
            return Choice(torch.empty(0, dtype=torch.int64))
        return self.sampler.choose(logits, rows.requests, rows.ends, slots, self.last_token, greedy)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to), in every layer, after what the current step writes."""
        pairs = torch.tensor(copies, dtype=torch.int64)
        if self.device.type == "cuda":
            pairs = pairs.pin_memory().to(self.device, non_blocking=True)
        source, target = pairs.unbind(1)
        for store in self._stores:
            store.index_copy_(0, target, store[source])


def _make_executor(
    model: Any, shape: ModelShape, config: ResolvedConfig, backend: AttentionBackend, caches: LayerCaches
) -> Executor:
    executor: TraceableExecutor
    if config.use_fused_forward:
        executor = FusedDecoder(model, backend, caches, _longest(shape, config), config.packed_weights)
    else:
        executor = BridgedModel(model, backend, caches)
    varlen, decode = config.varlen_compile_config, config.decode_compile_config
    if varlen is None and decode is None:
        return executor
    return CompiledExecutor(
        executor, varlen, decode, config.decode_kernel, config.max_batch_tokens, config.max_requests_per_batch
    )


def _longest(shape: ModelShape, config: ResolvedConfig) -> int:
    """Positions that a request can reach: the model's, or what the whole cache holds where it states none."""
    return shape.max_positions or config.num_blocks * config.page_size

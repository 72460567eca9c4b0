"""Seed faults, one at a time, and see each caught by a test of ``make test``.

    python -m tests.support.seeded_faults [--room passes] [--only 7 12]

In: a table of slips, each a place in the code and another text for it, with the tests that shall catch it.
Out: a line for each, how many of them were caught, and exit code 1 unless all were. A copy of the tree is
changed, never this one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_context = multiprocessing.get_context("forkserver")
FAILED = 1  # pytest's exit code for tests that ran and failed, and for nothing else


@dataclass(frozen=True)
class Fault:
    """A slip in a ``file``: ``new`` in the place of ``old``, which stands there once."""

    room: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


FAULTS: tuple[Fault, ...] = (
    Fault(
        "passes",
        "passes/synchronize.py",
        "            _keep_last(latest, self.compute)  # what it takes",
        "            pass  # what it takes",
        ("tests/unit/schedule/test_orders.py::test_what_lowering_makes_is_proven",),
    ),
    Fault(
        "passes",
        "passes/synchronize.py",
        "if clock[other.stream] < other.tick:\n                    waits",
        "if clock[other.stream] < other.tick - 1:\n                    waits",
        ("tests/unit/passes/test_passes.py::test_synchronize_waits_for_what_is_needed_and_no_more",),
    ),
    Fault(
        "passes",
        "passes/assign_slots.py",
        "stays[after][0] < end)",
        "stays[after][0] < start)",
        ("tests/unit/schedule/test_orders.py::test_what_lowering_makes_is_proven",),
    ),
    Fault(
        "passes",
        "passes/insert_frees.py",
        "                last[token] = index\n",
        "                last.setdefault(token, index)\n",
        ("tests/unit/passes/test_passes.py::test_insert_frees_after_the_last_use",),
    ),
    Fault(
        "passes",
        "passes/insert_collectives.py",
        "op.with_(reads=(*op.reads, Agreed())) if changes else op",
        "op",
        ("tests/unit/schedule/test_collectives.py",),
    ),
    Fault(
        "passes",
        "passes/insert_collectives.py",
        "constant = step.constant_bytes + sum(shards) + 2 * exchange",
        "constant = step.constant_bytes + sum(shards) + exchange",
        ("tests/unit/schedule/test_collectives.py",),
    ),
    Fault(
        "passes",
        "passes/insert_offload.py",
        "        if step.ops[i].block != step.ops[index].block:\n            return False",
        "        if step.ops[i].block != step.ops[index].block:\n            break",
        ("tests/unit/passes/test_passes.py",),
    ),
    Fault(
        "passes",
        "passes/insert_offloaded_io.py",
        "begin = max(begin, fills[number - plan.window])",
        "begin = max(begin, fills[number - plan.window] - 1)",
        ("tests/unit/passes/test_passes.py::test_insert_offloaded_io_passes_them_through_two_buffers",),
    ),
    Fault(
        "schedule",
        "megacompile/schedule/emit_loops.py",
        "times = 2 + even // period",
        "times = 3 + even // period",
        ("tests/unit/schedule/test_emit.py::test_loops_are_exact",),
    ),
    Fault(
        "schedule",
        "megacompile/schedule/emit_loops.py",
        "constant = value - slope * origin",
        "constant = value + slope * origin",
        ("tests/unit/schedule/test_emit.py::test_loops_are_exact",),
    ),
    Fault(
        "schedule",
        "megacompile/schedule/verify_collectives.py",
        "            here[op.group] = False\n",
        "            here[op.group] = True\n",
        ("tests/unit/schedule/test_collectives.py",),
    ),
    Fault(
        "schedule",
        "megacompile/schedule/verify.py",
        "return a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes",
        "return a.offset <= b.offset < a.offset + a.nbytes",
        ("tests/unit/schedule/test_faults.py::test_slot_of_a_group_that_is_still_there",),
    ),
    Fault(
        "hardware",
        "megacompile/hardware/simulate.py",
        "return asking + work if machine.shared_cores else max(asking, work)",
        "return asking + work",
        ("tests/unit/hardware/test_simulate.py::test_durations_by_kind",),
    ),
    Fault(
        "hardware",
        "megacompile/hardware/simulate.py",
        '        begin = clock["compute"]\n',
        "        begin = 0.0\n",
        ("tests/unit/hardware/test_simulate.py::test_with_room_for_all_sharing_changes_nothing",),
    ),
    Fault(
        "hardware",
        "megacompile/hardware/contention.py",
        "slow_cores, slow_memory = max(1.0, cores), max(1.0, memory)",
        "slow_cores, slow_memory = max(1.0, memory), max(1.0, cores)",
        ("tests/unit/hardware/test_simulate.py::test_two_copies_and_an_update_share_host_memory",),
    ),
    Fault(
        "hardware",
        "megacompile/hardware/simulate.py",
        "op.nbytes / (machine.memory_bandwidth if on_gpu else machine.update_bandwidth)",
        "op.nbytes / machine.update_bandwidth",
        ("tests/unit/hardware/test_simulate.py::test_durations_by_kind",),
    ),
    Fault(
        "hardware",
        "megacompile/hardware/caching_allocator.py",
        "                self.trim()\n",
        "",
        ("tests/unit/hardware/test_caching_allocator.py",),
    ),
    Fault(
        "runtime",
        "megacompile/runtime/step_output.py",
        "weighted = [w * x for w, x in zip(self._weights, losses, strict=True)]",
        "weighted = list(losses)",
        ("tests/e2e/test_against_eager.py::test_micro_batches_equal_eager_accumulation[plain]",),
    ),
    Fault(
        "runtime",
        "megacompile/runtime/gradient_reduction.py",
        "    target.zero_()\n",
        "",
        ("tests/unit/runtime/test_fabric.py::test_shards_together_are_the_sum_in_the_order_of_ranks",),
    ),
    Fault(
        "runtime",
        "megacompile/runtime/gradient_reduction.py",
        "summed = piece.chunk(replicas)[own].copy_(first)",
        "summed = piece.chunk(replicas)[0].copy_(first)",
        ("tests/unit/runtime/test_fabric.py::test_shards_are_added_up_in_the_order_of_replicas",),
    ),
    Fault(
        "runtime",
        "megacompile/runtime/staging.py",
        "            piece.ready()\n            buffer = piece.buffer[: part.numel()]",
        "            buffer = piece.buffer[: part.numel()]",
        ("tests/unit/cuda/test_staging.py::test_the_record_orders_every_use_of_a_buffer",),
    ),
    Fault(
        "runtime",
        "megacompile/runtime/cuda_streams.py",
        'self._pushed if stream in ("host", "nvme_write") else None',
        'self._pushed if stream == "nvme_write" else None',
        ("tests/unit/cuda/test_streams.py::test_streams_waits_and_records_imply_every_edge_of_the_step",),
    ),
    Fault(
        "runtime",
        "megacompile/runtime/step_results.py",
        "seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + micro * 0x94D049BB133111EB",
        "seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9",
        (
            "tests/unit/capture/test_draws.py"
            "::test_each_micro_batch_and_step_draws_anew_and_equal_layers_share_their_code",
        ),
    ),
    Fault(
        "runtime",
        "megacompile/runtime/executor.py",
        "fresh = set(slots) - waiting",
        "fresh = set(slots)",
        ("tests/e2e/test_program.py::test_accumulation_by_hand",),
    ),
    Fault(
        "runtime",
        "megacompile/runtime/executor.py",
        "(ProgramError, NonFiniteError, DeviceFullError)) and not pushed",
        "(ProgramError, NonFiniteError, DeviceFullError, OSError))",
        ("tests/e2e/test_faults.py::test_gradients_that_are_lost_are_not_passed_over",),
    ),
    Fault(
        "state",
        "megacompile/state/host_arena.py",
        "self._set_free(start + need, start + size)",
        "self._set_free(start + nbytes, start + size)",
        ("tests/unit/runtime/test_host_buffers.py::test_a_room_gives_no_byte_twice_and_gets_all_back",),
    ),
    Fault(
        "state",
        "megacompile/state/host_arena.py",
        "if gap[1] == start or gap[0] == stop]",
        "if gap[1] == start]",
        ("tests/unit/runtime/test_host_buffers.py::test_a_room_gives_no_byte_twice_and_gets_all_back",),
    ),
    Fault(
        "state",
        "megacompile/state/host_arena.py",
        "self.used_bytes = start + padded(stop - start)",
        "self.used_bytes = stop",
        ("tests/unit/state/test_arena.py",),
    ),
    Fault(
        "state",
        "megacompile/state/adam.h",
        ".correction2_sqrt = (float)sqrt(1 - pow(h->beta2, h->step)),",
        ".correction2_sqrt = (float)(1 - pow(h->beta2, h->step)),",
        ("tests/unit/state/test_adam.py::test_equals_torch_fused",),
    ),
    Fault(
        "state",
        "megacompile/state/adam.h",
        "return (uint16_t)((bits + 0x8000u) >> 16);",
        "return (uint16_t)(bits >> 16);",
        ("tests/unit/state/test_adam.py::test_high_half_is_bf16_to_nearest",),
    ),
    Fault(
        "state",
        "megacompile/state/adam.h",
        "(float)(adamw ? 1 - h->lr * h->weight_decay : 1)",
        "(float)(adamw ? 1 - h->weight_decay : 1)",
        ("tests/unit/state/test_adam.py::test_equals_torch_fused",),
    ),
    Fault(
        "distributed",
        "megacompile/distributed/calls.py",
        "        self._noted.clear()\n",
        "",
        (
            "tests/e2e/test_ranks_faults.py::test_unlike_calls_and_ranks_that_leave_are_named_with_the_script_s_line",
        ),
    ),
    Fault(
        "distributed",
        "megacompile/distributed/calls.py",
        "        if self._current is not None:\n            yield\n            return\n",
        "",
        (
            "tests/e2e/test_ranks_faults.py::test_unlike_calls_and_ranks_that_leave_are_named_with_the_script_s_line",
        ),
    ),
    Fault(
        "distributed",
        "megacompile/distributed/ranks.py",
        "return self.size // self.shards",
        "return max(1, self.size // self.shards - 1)",
        ("tests/e2e/test_mesh.py",),
    ),
    Fault(
        "capture",
        "megacompile/capture/padded_length.py",
        "return padded if longest is None else max(length, min(padded, longest))",
        "return padded",
        ("tests/unit/capture/test_padding.py::test_no_batch_is_padded_past_the_positions_of_a_model",),
    ),
    Fault(
        "capture",
        "megacompile/capture/batch.py",
        "return output[:, : -self.added].contiguous() if cut else output",
        "return output[:, self.added :].contiguous() if cut else output",
        ("tests/e2e/test_predict.py::test_a_mask_that_pads_and_another_length",),
    ),
    Fault(
        "capture",
        "megacompile/capture/fingerprint.py",
        "        if not evaluate:\n            found.append(module.training)\n",
        "",
        ("tests/unit/capture/test_snapshot.py::test_settings_tell_values_apart_that_are_equal",),
    ),
    Fault(
        "capture",
        "megacompile/capture/loss_padding.py",
        "elif bool(padded[:, n:].any()) or not _close(padded[:, :n], gradient):",
        "elif not _close(padded[:, :n], gradient):",
        ("tests/unit/capture/test_loss_padding.py::test_a_loss_function_is_known_to_ignore_padding",),
    ),
    Fault(
        "capture",
        "megacompile/capture/changed_buffers.py",
        "        if buffer in needed:\n            _put_snapshot(graph, buffer)\n",
        "",
        ("tests/e2e/test_changed_buffers.py::test_blocks_compute_again_with_what_they_have_read",),
    ),
    Fault(
        "capture",
        "megacompile/capture/random_draws.py",
        "self._last, self._drawn = args[places[1]], 0",
        "self._last = args[places[1]]",
        ("tests/unit/capture/test_draws.py::test_equal_layers_share_their_code_beside_dropout",),
    ),
    Fault(
        "blocks",
        "megacompile/blocks/costs.py",
        "return int(2 * products * rows * inner * args[1].shape[-1])",
        "return int(products * rows * inner * args[1].shape[-1])",
        ("tests/unit/blocks/test_costs.py",),
    ),
    Fault(
        "blocks",
        "megacompile/blocks/costs.py",
        "return flops(node, share), whole + round(share * sum(",
        "return flops(node, share), whole + round(sum(",
        ("tests/unit/blocks/test_costs.py",),
    ),
    Fault(
        "blocks",
        "megacompile/blocks/partition.py",
        "lines: list[Any] = [kinds, grads, *([writes] if writes else [])]",
        "lines: list[Any] = [kinds, *([writes] if writes else [])]",
        ("tests/e2e/test_program.py::test_param_groups_frozen_parts_and_scheduler",),
    ),
    Fault(
        "blocks",
        "megacompile/blocks/weight_groups.py",
        "            loads[shard] += sizes[parameter.name]\n",
        "",
        ("tests/unit/blocks/test_owners.py::test_no_border_lies_within_what_is_stepped_whole",),
    ),
    Fault(
        "blocks",
        "megacompile/blocks/lifetimes.py",
        "holdings.peak = max(holdings.peak, holdings.live + inside)",
        "holdings.peak = max(holdings.peak, inside)",
        ("tests/unit/blocks/test_lifetimes.py::test_a_trace_tells_what_a_run_holds",),
    ),
    Fault(
        "blocks",
        "megacompile/blocks/template_cache.py",
        "modes, own, gpu, chunk",
        "modes, own, chunk",
        ("tests/e2e/test_second_start.py::test_what_functions_depend_on_differentiates_again",),
    ),
    Fault(
        "blocks",
        "megacompile/blocks/template_cache.py",
        "what_decides(template, gpu, chunk), *options)",
        "what_decides(template, gpu, chunk), options[0])",
        ("tests/e2e/test_second_start.py::test_what_functions_depend_on_differentiates_again",),
    ),
    Fault(
        "blocks",
        "megacompile/blocks/folded_sums.py",
        "if not earlier < maker or not _read_by_nothing_else(later, shown):",
        "if not earlier < maker:",
        ("tests/unit/blocks/test_folded_sums.py",),
    ),
    Fault(
        "planner",
        "megacompile/planner/simplex.py",
        "            return float(-reduced[-1])",
        "            return float(reduced[-1])",
        ("tests/unit/planner/test_simplex.py",),
    ),
    Fault(
        "planner",
        "megacompile/planner/simplex.py",
        "        ties = able[ratios <= ratios.min() + 1e-12]",
        "        ties = able[ratios >= ratios.max() - 1e-12]",
        ("tests/unit/planner/test_simplex.py",),
    ),
    Fault(
        "planner",
        "megacompile/planner/simplex.py",
        "    basis[row] = column\n",
        "",
        ("tests/unit/planner/test_simplex.py",),
    ),
    Fault(
        "planner",
        "megacompile/planner/tiling.py",
        "            if activations_bytes(tiling.assembly.work, mode) > most:\n                return",
        "            if activations_bytes(tiling.assembly.work, mode) > most:\n                continue",
        ("tests/unit/planner/test_tiling.py",),
    ),
    Fault(
        "planner",
        "megacompile/planner/nvme_placement.py",
        "left = tiers.host_budget_bytes - candidate.ram - window * candidate.buffers",
        "left = tiers.host_budget_bytes - candidate.ram - candidate.buffers",
        (
            "tests/unit/planner/test_tiers.py::test_a_placement_leaves_what_is_taken_and_stores_no_less_for_more",
        ),
    ),
    Fault(
        "planner",
        "megacompile/planner/search.py",
        "kept = place_of(work.digest, work.updates, mode, machine, budget_bytes, host_budget, places, also)",
        "kept = place_of(work.digest, mode, machine, budget_bytes, host_budget, places, also)",
        ("tests/unit/planner/test_plan_cache.py::test_what_a_search_depends_on_searches_again",),
    ),
    Fault(
        "planner",
        "megacompile/planner/lower_bound.py",
        'for way in ("nvme_read", "nvme_write")',
        'for way in ("nvme_read",)',
        ("tests/unit/cli/test_cli.py::test_the_bound_by_hand",),
    ),
    Fault(
        "kernels",
        "kernels/rms_norm.py",
        "rstd = 1.0 / tl.sqrt(tl.sum(wide_x * wide_x, axis=1) / columns + eps)",
        "rstd = 1.0 / (tl.sqrt(tl.sum(wide_x * wide_x, axis=1) / columns) + eps)",
        ("tests/unit/kernels/interpreted/test_rms_norm.py",),
    ),
    Fault(
        "kernels",
        "kernels/rms_norm.py",
        "        mean = tl.sum(grad * normal, axis=1) / columns\n        if WIDE:",
        "        mean = tl.sum(grad, axis=1) / columns\n        if WIDE:",
        ("tests/unit/kernels/interpreted/test_rms_norm.py",),
    ),
    Fault(
        "kernels",
        "kernels/rms_norm.py",
        "row = tl.program_id(0).to(tl.int64) * BLOCK_M",
        "row = tl.program_id(0) * BLOCK_M",
        ("tests/unit/kernels/test_offsets.py::test_no_integer_wraps",),
    ),
    Fault(
        "kernels",
        "kernels/rope.py",
        "        return a * cos_a + b * sin_b, b * cos_b - a * sin_a",
        "        return a * cos_a + b * sin_a, b * cos_b - a * sin_b",
        ("tests/unit/kernels/interpreted/test_rope.py::test_gradcheck",),
    ),
    Fault(
        "kernels",
        "kernels/adamw.py",
        "high = ((bits + 0x8000) >> 16)",
        "high = (bits >> 16)",
        ("tests/unit/kernels/interpreted/test_adamw.py::test_the_kernel_keeps_every_half",),
    ),
    Fault(
        "kernels",
        "kernels/cross_entropy_tiles.py",
        "total = total * tl.exp2((top - base) * LOG2E) + tl.sum(",
        "total = total + tl.sum(",
        (
            "tests/unit/kernels/interpreted/test_cross_entropy.py::test_linear_does_not_depend_on_the_tile_in_value",
        ),
    ),
    Fault(
        "kernels",
        "kernels/decode_4bit.py",
        "(4 - at % 2 * 4)",
        "(at % 2 * 4)",
        ("tests/unit/kernels/interpreted/test_decode_4bit.py",),
    ),
    Fault(
        "kernels",
        "kernels/query_chunks.py",
        "first = queries.start + shift - has.window + 1 if has.window else 0",
        "first = queries.start + shift - has.window + 2 if has.window else 0",
        ("tests/unit/kernels/test_query_chunks.py::test_chunks_give_what_all_queries_at_once_do",),
    ),
    Fault(
        "report",
        "megacompile/report/schedule.py",
        "        if not same:\n",
        "        if same is None:\n",
        ("tests/unit/report/test_inspect.py",),
    ),
    Fault(
        "report",
        "megacompile/report/schedule.py",
        "        _check_names(found)\n",
        "",
        ("tests/unit/report/test_inspect.py",),
    ),
    Fault(
        "report",
        "megacompile/report/explain.py",
        "            waiting -= op.nbytes\n",
        "            pass\n",
        ("tests/unit/report/test_inspect.py::test_activations_that_came_back_wait_no_more",),
    ),
    Fault(
        "cli",
        "megacompile/units.py",
        "nbytes = available * number / 100 if",
        "nbytes = available * number if",
        ("tests/e2e/test_bad_input.py::test_budget_is_read",),
    ),
    Fault(
        "cli",
        "megacompile/cli/chat_rows.py",
        "return _system(row) + turns",
        "return turns",
        ("tests/e2e/test_train_command.py::test_what_the_system_says_comes_first",),
    ),
    Fault(
        "cli",
        "megacompile/cli/largest_batch.py",
        "low, high = (n, high) if known[n] <= 0 else (low, n)",
        "low, high = (n, high) if known[n] <= 0 else (low, n - 1)",
        ("tests/unit/cli/test_cli.py::test_the_largest_that_fits_is_found_in_few_steps",),
    ),
    Fault(
        "cli",
        "megacompile/cli/workload_flops.py",
        "round(call.flops * factor)",
        "round(call.flops * missed)",
        ("tests/unit/cli/test_cli.py::test_flops_that_the_graph_misses_are_added",),
    ),
    Fault(
        "cli",
        "megacompile/cli/alternatives.py",
        'return f"{-(-nbytes // 10**8) / 10:g}GB"',
        'return f"{nbytes // 10**8 / 10:g}GB"',
        ("tests/unit/cli/test_cli.py::test_a_budget_that_is_named_suffices",),
    ),
    Fault(
        "integrations",
        "megacompile/integrations/image_buckets.py",
        'empty = IGNORED if name.endswith("labels")',
        'empty = 0 if name.endswith("labels")',
        ("tests/unit/integrations/test_image_buckets.py",),
    ),
    Fault(
        "integrations",
        "megacompile/integrations/image_buckets.py",
        "row[: int(kept.sum())] = old[kept]",
        "row[: len(old)] = old",
        ("tests/unit/integrations/test_image_buckets.py",),
    ),
    Fault(
        "integrations",
        "megacompile/integrations/assistant_masks.py",
        "first < stop and begin < end",
        "first <= stop and begin < end",
        ("tests/e2e/test_labels.py::test_all_turns_of_the_assistant_are_learned_and_nothing_else",),
    ),
    Fault(
        "integrations",
        "megacompile/integrations/trainer_steps.py",
        "average = trainer._tr_loss / (1 + step - trainer._globalstep_last_logged)",
        "average = trainer._tr_loss / (step - trainer._globalstep_last_logged)",
        ("tests/e2e/test_nonfinite.py::test_a_trainer_logs_what_plain_transformers_does",),
    ),
    Fault(
        "integrations",
        "megacompile/integrations/training_arguments.py",
        '    options["seed"] = arguments.seed\n',
        "",
        ("tests/e2e/test_trainer.py::test_arguments_become_options_of_compile",),
    ),
    Fault(
        "integrations",
        "megacompile/integrations/saving.py",
        "        self._state.best_model_checkpoint = self._best_before\n",
        "",
        ("tests/e2e/test_trainer_saving.py::test_what_the_disk_did_not_take_is_not_the_best",),
    ),
    Fault(
        "integrations",
        "megacompile/integrations/trainer_steps.py",
        "weight = 1.0 if self._is_scaled(count) else 1.0 / (steps * ranks)\n            return",
        "weight = 1.0 if self._is_scaled(count) else 1.0 / steps\n            return",
        ("tests/e2e/test_trainer_ranks.py::test_micro_batches_weigh_alike_unless_their_count_weighs_them",),
    ),
    Fault(
        "api",
        "megacompile/api/program.py",
        "            session.runtime.state.reset_moments()\n",
        "            pass\n",
        (
            "tests/e2e/test_faults.py::test_weights_loaded_after_an_inconsistent_step_start_without_its_moments",
        ),
    ),
    Fault(
        "api",
        "megacompile/api/padder.py",
        "step_seconds * (1 - least / near)",
        "step_seconds * (least / near)",
        ("tests/e2e/test_lengths.py::test_a_length_gets_a_program_once_its_padding_has_cost_as_much",),
    ),
    Fault(
        "api",
        "megacompile/api/session.py",
        "self.calls += mode.computes_gradients",
        'self.calls += mode.kind == "train"',
        (
            "tests/unit/capture/test_draws.py::test_each_micro_batch_and_step_draws_anew_and_equal_layers_share_their_code",
        ),
    ),
    Fault(
        "api",
        "megacompile/api/program.py",
        'Mode("accumulate"), [weight], loss=',
        'Mode("accumulate"), [1.0], loss=',
        (
            "tests/e2e/test_between_steps.py::test_gradients_of_every_kind_of_batch_are_applied[False-1.0-host]",
        ),
    ),
    Fault(
        "api",
        "megacompile/api/generate_without_cache.py",
        'batch["logits_to_keep"] = torch.tensor([length - 1])',
        'batch["logits_to_keep"] = torch.tensor([self.padded - 1])',
        ("tests/e2e/test_generate.py::test_logits_of_one_position_where_the_forward_gives_all",),
    ),
    Fault(
        "api",
        "megacompile/api/session.py",
        "self.seed, self.calls = progress.seed, progress.calls",
        "self.calls = progress.calls",
        ("tests/e2e/test_checkpoint.py::test_a_new_process_goes_on_bit_for_bit",),
    ),
    Fault(
        "api",
        "megacompile/api/pipeline.py",
        "if (batch.key, mode) in decided.programs:",
        "if decided.knows(batch):",
        (
            "tests/unit/capture/test_draws.py"
            "::test_each_micro_batch_and_step_draws_anew_and_equal_layers_share_their_code",
        ),
    ),
    Fault(
        "api",
        "megacompile/api/generate_with_cache.py",
        "                self._random_state(draws)\n",
        "",
        ("tests/e2e/test_rollout.py::test_the_budget_is_held_to_the_byte",),
    ),
    Fault(
        "graph",
        "megacompile/graph/fusion_check.py",
        "float((x.double() - reference).abs().max()) / scale for x in (got, want))",
        "float((x.double() - reference).abs().max()) / scale for x in (want, got))",
        ("tests/unit/graph/test_fuse.py::test_a_wrong_operator_is_not_placed",),
    ),
    Fault(
        "graph",
        "megacompile/graph/head_tiles.py",
        "local = emit.call(aten.sub.Tensor, local, piece.rows)",
        "local = emit.call(aten.sub.Tensor, local, piece.stop)",
        ("tests/unit/graph/test_tile.py::test_a_cut_table_embeds_and_predicts_as_the_whole_one",),
    ),
    Fault(
        "runtime",
        "megacompile/runtime/executor.py",
        "self._earlier[group].catch_up(slot, own, self._device.adam_threads)",
        "pass",
        ("tests/unit/graph/test_rows.py::test_a_lookup_brings_up_to_date_what_the_step_before_has_left",),
    ),
    Fault(
        "graph",
        "megacompile/graph/gathered_rows.py",
        "rest[0] if rest and rest[0] >= 0 else -1,",
        "rest[0] if rest and rest[0] > 0 else -1,",
        ("tests/unit/graph/test_rows.py::test_the_row_of_padding_gets_no_gradient",),
    ),
    Fault(
        "graph",
        "megacompile/graph/sequence_dimension.py",
        'causal = named["causal"] and len(lengths) == 1 and',
        "causal = len(lengths) == 1 and",
        (
            "tests/unit/capture/test_right_padding.py"
            "::test_the_proof_holds_exactly_where_nothing_at_padding_counts[all keys]",
        ),
    ),
    Fault(
        "kernels",
        "kernels/eager_check.py",
        "if not e <= a]",
        "if e <= a]",
        ("tests/unit/bench/test_bench_kernels.py::test_a_wrong_provider_is_not_timed",),
    ),
)


def main() -> int:
    """Seed the faults that were asked for; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--room", choices=sorted({fault.room for fault in FAULTS}), help="those of one room")
    parser.add_argument("--only", type=int, nargs="+", help="those of these numbers")
    options = parser.parse_args()
    chosen = [
        (number, fault)
        for number, fault in enumerate(FAULTS)
        if options.room in (None, fault.room) and (options.only is None or number in options.only)
    ]
    # Not on import: a process has one fork server, which in ``make test`` has what scripts.py names.
    _context.set_forkserver_preload(["pytest", "hypothesis", "torch", "torch.distributed", "transformers"])
    missed = []
    with copied_tree() as tree:
        for room in dict.fromkeys(fault.room for _, fault in chosen):  # together they fail
            own = [(number, fault) for number, fault in chosen if fault.room == room]
            tests = sorted({test for _, fault in own for test in fault.tests})
            if run_tests(tree, tests) != 0:
                print(f"The tests of {room} fail without a fault: {' '.join(tests)}", flush=True)
                missed += [number for number, _ in own]
                continue
            missed += [number for number, fault in own if not _is_caught(tree, number, fault)]
    print(f"caught {len(chosen) - len(missed)} of {len(chosen)}" + (f", not {missed}" if missed else ""))
    return int(bool(missed) or not chosen)


def _is_caught(tree: Path, number: int, fault: Fault) -> bool:
    start = time.monotonic()
    with seeded(tree, fault):
        caught = run_tests(tree, fault.tests) == FAILED
    what = "caught" if caught else "NOT caught"
    slip = " ".join((fault.new.strip() or f"without {fault.old}").split())
    print(f"{number:3} {what:10} {time.monotonic() - start:4.0f} s  {fault.file}: {slip}", flush=True)
    return caught


@contextmanager
def copied_tree() -> Iterator[Path]:
    """A copy of the files that git knows, whose packages Python finds before those that are installed."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, tree / name)
        packages = tomllib.loads((tree / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
        for package, place in packages.items():
            if "." in package:  # a package that lies elsewhere
                (tree / package.replace(".", "/")).symlink_to(tree / place)
        yield tree


@contextmanager
def seeded(tree: Path, fault: Fault) -> Iterator[None]:
    """Within, the tree has the fault."""
    file = tree / fault.file
    sound = file.read_text()
    assert sound.count(fault.old) == 1, f"{fault.file} has {sound.count(fault.old)} times: {fault.old}"
    file.write_text(sound.replace(fault.old, fault.new))
    try:
        yield
    finally:
        file.write_text(sound)


def run_tests(tree: Path, tests: Sequence[str]) -> int:
    """Run tests of ``make test`` in a tree; returns pytest's exit code, of kernels' where others pass."""
    interpreted = [test for test in tests if "/interpreted/" in test]
    others = [test for test in tests if test not in interpreted]
    return (others and _pytest(tree, others, {})) or (
        _pytest(tree, interpreted, {"TRITON_INTERPRET": "1"}) if interpreted else 0
    )


def _pytest(tree: Path, tests: Sequence[str], environment: dict[str, str]) -> int:
    process = _context.Process(target=_test, args=(str(tree), tests, environment))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _test(tree: str, tests: Sequence[str], environment: dict[str, str]) -> None:
    """In a fork of a process that has imported all libraries, and nothing of a tree."""
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    os.environ |= {"PYTHONPATH": tree, "PYTHONDONTWRITEBYTECODE": "1"} | environment
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    os.chdir(tree)
    sys.path.insert(0, tree)
    import pytest

    given = [
        "-x",
        "-p",
        "no:cacheprovider",
        "--hypothesis-profile=unshrunk",
        "-m",
        "not slow and not nightly",
    ]
    sys.exit(int(pytest.main([*given, *tests])))


if __name__ == "__main__":
    sys.exit(main())

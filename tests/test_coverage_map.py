"""Every module of `_core` has tests: a file of its own in `tests/unit`, or the files that this table names."""

from pathlib import Path

from tests.documents import ROOT

CORE = ROOT / "src" / "headrace" / "_core"
TESTS = ROOT / "tests"

# Modules without a file ``unit/<room>/test_<module>.py``, and the test files that cover them, below `tests`.
COVERED_BY = {
    "call_site": "unit/device/test_pinning unit/consumer/test_skipping",
    "cache/disk_cache": "faults/test_cache unit/datasets/test_cached",
    "cache/entry": "faults/test_cache",
    "cache/folder": "faults/test_cache",
    "cache/get_many": "faults/test_joined_cache",
    "cache/in_flight": "faults/test_cache faults/test_joined_cache",
    "cache/locks": "faults/test_cache",
    "cache/quota": "faults/test_cache",
    "cache/write_pause": "faults/test_cache",
    "cache/writer": "faults/test_cache",
    "consumer/agreement": "ranks/test_coordinated",
    "consumer/batch_wait": "unit/consumer/test_timeouts unit/consumer/test_memory_budget",
    "consumer/block_order": "unit/test_samplers",
    "consumer/cursor_sampler": "unit/test_samplers unit/consumer/test_sampling",
    "consumer/data_parallel_checks": "ranks/test_data_parallel",
    "consumer/draws": "unit/consumer/test_resume",
    "consumer/epoch_seeds": "unit/test_seeding unit/consumer/test_resume",
    "consumer/failures": "unit/consumer/test_skipping unit/consumer/test_error_policies",
    "consumer/iterators": "unit/consumer/test_epoch",
    "consumer/lane_choice": "unit/consumer/test_lanes",
    "consumer/lane_turns": "unit/consumer/test_lanes",
    "consumer/lightning_loops": "integrations/test_lightning",
    "consumer/loader_state": "unit/consumer/test_resume",
    "consumer/opening": "unit/test_loader unit/consumer/test_epoch",
    "consumer/order": "unit/consumer/test_resume",
    "consumer/position": "unit/consumer/test_resume unit/test_seeding",
    "consumer/progress": "unit/consumer/test_resume",
    "consumer/rank_sampler": "unit/test_samplers ranks/test_processes",
    "consumer/replacements": "unit/consumer/test_skipping ranks/test_skipping",
    "consumer/restoring": "unit/consumer/test_resume",
    "consumer/saved_order": "unit/consumer/test_resume",
    "consumer/starting": "unit/consumer/test_epoch unit/test_seeding",
    "consumer/step_group": "ranks/test_coordinated",
    "consumer/stream_checks": "unit/interface/test_replication",
    "consumer/user_sampler": "unit/consumer/test_resume unit/consumer/test_resume_between_epochs",
    "consumer/undelivered": "unit/consumer/test_resume unit/consumer/test_resume_out_of_order",
    "data_parallel": "ranks/test_data_parallel",
    "descriptors": "faults/test_descriptors",
    "device/containers": "unit/device/test_copy unit/device/test_pinning",
    "device/registration": "unit/device/test_copy gpu/test_copies",
    "device/staging": "unit/device/test_copy gpu/test_copies",
    "device/streams": "unit/device/test_copy gpu/test_copies",
    "engine/config": "unit/engine/test_executors unit/test_loader",
    "engine/engine": "unit/consumer/test_epoch unit/test_loader",
    "engine/fetch_pool": "unit/engine/test_fetch unit/engine/test_concurrency",
    "engine/fetch_recorder": "unit/telemetry/test_trace",
    "engine/session": "unit/consumer/test_epoch unit/engine/test_handoff",
    "engine/stepping": "unit/interface/test_steps",
    "engine/stream_batch": "unit/engine/test_stream_positions unit/engine/test_fetch",
    "engine/streams": "unit/interface/test_epochs unit/engine/test_fetch faults/test_streams",
    "engine/tensor_gather": "parity/test_dataset_kinds unit/test_loader",
    "engine/torch_batches": "parity/test_dataset_kinds parity/test_workers",
    "engine/torch_readers": "parity/test_dataset_kinds parity/test_errors",
    "engine/worker_tasks": "parity/test_workers faults/test_workers",
    "error_policy": "unit/consumer/test_error_policies",
    "eventloop/block_warnings": "unit/eventloop/test_watchdog",
    "eventloop/lateness": "unit/eventloop/test_watchdog",
    "eventloop/stack_places": "unit/eventloop/test_watchdog",
    "interface/background_loop": "unit/interface/test_blocking_reads",
    "interface/block_reader": "unit/interface/test_steps",
    "interface/concatenation": "unit/datasets/test_combine unit/interface/test_compositions",
    "interface/distributed": "ranks/test_processes unit/interface/test_replication",
    "interface/equal_length": "unit/interface/test_stream_states",
    "interface/fetch_plan": "unit/interface/test_compositions unit/interface/test_function_placement",
    "interface/iterable_style": "unit/interface/test_kinds unit/interface/test_steps",
    "interface/iterators": "unit/interface/test_stream_states unit/interface/test_epochs faults/test_streams",
    "interface/joined_reads": "unit/interface/test_ranged unit/engine/test_range_fetch",
    "interface/lanes": "unit/consumer/test_lanes",
    "interface/map_style": "unit/interface/test_kinds unit/interface/test_compositions",
    "interface/multi_streams": "unit/datasets/test_combine unit/interface/test_stream_states",
    "interface/merged": "unit/test_state",
    "interface/repeat_and_pipe": "unit/interface/test_steps unit/interface/test_stream_states",
    "interface/replay_iterator": "unit/interface/test_stream_states",
    "interface/reprs": "unit/test_reprs",
    "interface/reread": "unit/interface/test_stream_states unit/interface/test_stream_state",
    "interface/shard_iterator": "unit/interface/test_stream_states unit/datasets/test_combine",
    "interface/shuffle_buffer": "unit/interface/test_stream_states unit/datasets/test_combine",
    "interface/stepped_iterators": "unit/interface/test_steps unit/interface/test_stream_states",
    "interface/stream_seeds": "unit/interface/test_stream_states",
    "interface/torch_adapters": "unit/interface/test_rebuilt",
    "interface/unused_options": "unit/test_options",
    "loader_types": "test_typing",
    "look_ahead": "unit/test_options",
    "manifest/csv_table": "unit/manifest/test_parsing faults/test_manifests",
    "manifest/key_validation": "unit/manifest/test_parsing faults/test_manifests",
    "manifest/labels": "unit/manifest/test_annotations unit/store/test_catalog",
    "manifest/listing_cache": "unit/datasets/test_objects",
    "manifest/object_list": "unit/datasets/test_objects unit/manifest/test_parsing",
    "manifest/parquet": "unit/manifest/test_parsing",
    "manifest/serialization": "unit/manifest/test_parsing",
    "manifest/table_file": "unit/manifest/test_parsing faults/test_manifests",
    "open_session": "unit/consumer/test_epoch unit/consumer/test_delivery",
    "pool/launch": "unit/pool/test_supervisor faults/test_workers",
    "pool/numbered_worker": "unit/pool/test_supervisor faults/test_workers",
    "pool/processes": "unit/pool/test_supervisor faults/test_workers",
    "pool/settings": "parity/test_process_settings",
    "pool/worker": "unit/pool/test_supervisor faults/test_workers",
    "retry_policy": "unit/store/test_backoff unit/test_options",
    "ray_placement": "integrations/test_engines_on_ray",
    "runtime/assembling": "unit/consumer/test_epoch parity/test_collation",
    "runtime/exit_hooks": "faults/test_leaving",
    "runtime/engine_session": "faults/test_engines",
    "runtime/engine_times": "faults/test_engines",
    "runtime/dataset_copy": "unit/runtime/test_change_detection",
    "runtime/group_session": "faults/test_engines",
    "runtime/inline": "parity/test_order parity/test_errors",
    "runtime/process": "faults/test_sidecar",
    "runtime/process_session": "faults/test_sidecar",
    "runtime/ray/actor": "integrations/test_engines_on_ray",
    "runtime/ray/cluster": "integrations/test_engines_on_ray",
    "runtime/ray/messages": "unit/runtime/ray/test_wire",
    "runtime/ray/placement": "integrations/test_engines_on_ray",
    "runtime/ray/session": "integrations/test_engines_on_ray",
    "runtime/select": "unit/test_loader faults/test_sidecar",
    "runtime/sidecar": "faults/test_sidecar faults/test_leaving",
    "runtime/sidecar_process": "faults/test_sidecar faults/test_leaving",
    "runtime/thread": "unit/test_loader faults/test_leaving",
    "shards/chunks": "unit/shards/test_interleave unit/shards/test_state",
    "shards/compression": "faults/test_hostile faults/test_shards unit/datasets/test_lines",
    "shards/parquet/file": "unit/datasets/test_parquet faults/test_parquet",
    "shards/parquet/row_groups": "unit/datasets/test_parquet faults/test_parquet",
    "shards/part_iterator": "unit/shards/test_state unit/shards/test_merging",
    "shards/partition": "unit/datasets/test_parquet unit/datasets/test_lines ranks/test_processes",
    "shards/positions": "unit/shards/test_state",
    "shards/shard_reader": "unit/shards/test_interleave unit/shards/test_state",
    "shards/stream": "unit/datasets/test_lines unit/datasets/test_tar",
    "shards/windows": "unit/shards/test_merging",
    "shards/tar/index": "unit/datasets/test_tar faults/test_shards",
    "shards/tar/samples": "unit/shards/tar/test_format unit/datasets/test_tar",
    "store/client": "unit/store/test_whole_objects unit/store/test_backoff faults/test_network",
    "store/errors": "unit/store/test_backoff contract/test_stores",
    "store/etags": "unit/store/test_string_array unit/store/test_checksums",
    "store/forks": "unit/datasets/test_objects",
    "store/get": "unit/store/test_whole_objects unit/store/test_unsized faults/test_network",
    "store/head": "unit/store/test_whole_objects unit/store/test_unsized",
    "store/list_requests": "unit/store/test_listing contract/test_s3_moto",
    "store/multipart": "unit/store/test_unsized faults/test_network",
    "store/open": "contract/test_stores unit/store/test_store_options",
    "store/prefix_listing": "unit/store/test_listing contract/test_s3_moto",
    "store/profiles": "unit/store/test_store_options",
    "store/request_stats": "unit/telemetry/test_counters",
    "store/requests": "unit/store/test_whole_objects faults/test_network",
    "store/retry_after": "unit/store/test_backoff faults/test_network",
    "store/schemes": "unit/store/test_kinds contract/test_stores",
    "store/store_id": "unit/store/test_store_options faults/test_cache",
    "text": "unit/test_errors unit/consumer/test_skipping",
    "torchcompat/datapipes": "parity/test_dataset_kinds",
    "torchcompat/portable_collate": "unit/interface/test_rebuilt",
    "torchcompat/private": "unit/torchcompat/test_private_names",
    "transport/arena": "unit/transport/test_allocator",
    "transport/descriptors": "unit/transport/test_shared_pickle",
    "transport/exceptions": "faults/test_workers parity/test_errors",
    "transport/frames": "unit/transport/test_channel unit/transport/test_allocator",
    "transport/mapped": "unit/transport/test_allocator",
    "transport/mapper": "unit/transport/test_allocator",
    "transport/payload": "unit/transport/test_packing",
    "transport/sharing": "unit/transport/test_shared_pickle unit/transport/test_pickling",
}


def modules():
    """The modules of `_core`, without packages whose `__init__` has only a docstring."""
    return sorted(path.relative_to(CORE) for path in CORE.rglob("*.py") if path.name != "__init__.py")


def has_own_file(module: Path) -> bool:
    return (TESTS / "unit" / module.parent / f"test_{module.name}").exists()


def test_every_module_of_core_has_a_unit_file_or_an_entry():
    without = [module for module in modules() if not has_own_file(module)]
    missing = [str(module) for module in without if str(module.with_suffix("")) not in COVERED_BY]
    assert not missing, f"write tests/unit/<room>/test_<module>.py, or name the tests in COVERED_BY: {missing}"


def test_entries_name_modules_without_a_unit_file():
    without = {str(module.with_suffix("")) for module in modules() if not has_own_file(module)}
    assert not (superfluous := sorted(COVERED_BY.keys() - without)), f"remove from COVERED_BY: {superfluous}"


def test_entries_name_existing_test_files():
    named = {name for files in COVERED_BY.values() for name in files.split()}
    missing = [name for name in sorted(named) if not (TESTS / f"{name}.py").exists()]
    assert not missing, f"COVERED_BY names files that do not exist: {missing}"


def test_no_test_file_is_empty():
    files = [path for path in TESTS.rglob("test_*.py") if "def test_" not in path.read_text()]
    assert [path.relative_to(TESTS).as_posix() for path in files] == []

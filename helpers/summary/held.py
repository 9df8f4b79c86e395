"""What the chapters promise of correctness, which no record can show: each promise with the test that holds it."""

import pandas as pd

HELD = [
    ("01_amp", "over 10,000 steps with planted inf and nan: scale, skips and weights are torch's scaler's, bit for bit",
     "amp/test_scaler.py::test_equals_torchs_scaler_bit_for_bit"),
    ("01_amp", "a fused step reads nothing on the host",
     "amp/test_scaler.py::test_a_fused_step_reads_nothing_on_the_host"),
    ("01_amp", "result types of operations are those of torch.autocast",
     "amp/test_autocast_policy.py::test_result_types_are_those_of_torch_autocast"),
    ("02_batching", "every index once, no spread beyond k",
     "batching/test_sampler.py::test_every_index_comes_once_and_no_batch_spreads_beyond_k"),
    ("02_batching", "ranks share nothing",
     "batching/test_sampler.py::test_ranks_get_equally_many_batches_and_share_nothing"),
    ("02_batching", "a packed document's gradients are those it has alone",
     "batching/test_attention.py::test_gradients_are_those_of_each_document_alone"),
    ("03_profiling", "each planted inefficiency is found by its name",
     "profiling/test_diagnose.py::test_what_is_planted_is_found_alone_by_its_name_and_where_it_stands"),
    ("03_profiling", "a clean loop has no findings", "profiling/test_diagnose.py::test_a_clean_loop_has_no_findings"),
    ("03_profiling", "fixes for speed leave every loss and gradient as it is",
     "training/test_switched.py::test_a_speed_only_fix_leaves_every_loss_and_gradient_as_it_is"),
    ("03_profiling", "module times and what is outside add up to the step",
     "profiling/test_module_profiler.py::test_own_times_and_what_is_outside_add_up_to_the_step"),
    ("04_swiglu_checkpointing", "output and gradients equal the plain module's at any shape",
     "swiglu/test_layer.py::test_equals_the_plain_module_at_any_shape"),
    ("04_swiglu_checkpointing", "saved bytes of each level are exactly those derived",
     "swiglu/test_costs.py::test_a_level_keeps_exactly_the_derived_bytes"),
    ("05_optimization_rush", "Llama's logits are those of transformers",
     "models/test_llama.py::test_logits_are_those_of_transformers"),
    ("05_optimization_rush", "DDP, ZeRO-2, ZeRO-3 and TP on two processes: losses and gradients of one process",
     "rush/test_distributed.py::test_a_strategy_gives_the_losses_and_gradients_of_one_process"),
    ("05_optimization_rush", "each step of the ladder runs on the tiny model, or says why it can't",
     "rush/test_trainer.py::test_a_step_of_the_ladder_runs_on_the_tiny_model_or_says_why_not"),
    ("06_data_pipelines", "every format gives the samples back as they were written",
     "pipelines/test_formats.py::test_samples_come_back_as_they_were_written"),
    ("06_data_pipelines", "all ranks and workers together get every sample once",
     "pipelines/test_formats.py::test_streams_of_all_ranks_and_workers_give_every_sample_once"),
    ("06_data_pipelines", "a flipped bit is named and costs only its sample",
     "pipelines/test_formats_faults.py::test_a_flipped_bit_is_named_and_costs_only_its_sample"),
    ("06_data_pipelines", "a file that is cut anywhere loses only what is gone, and says so",
     "pipelines/test_formats_faults.py::test_a_file_that_is_cut_anywhere_loses_only_what_is_gone_and_says_so"),
    ("07_compilers", "what each way of capturing gets right and wrong is the same on every run",
     "compilers/test_semantics.py::test_a_variant_is_right_or_wrong_about_a_case"),
    ("07_compilers", "every way of fusing agrees with separate operations",
     "compilers/test_fusion.py::test_every_variant_agrees_with_the_eager_one"),
]  # fmt: skip


def table() -> pd.DataFrame:
    """The promises, with the file and name of their tests."""
    return pd.DataFrame([{"chapter": notebook[:2], "what holds": what, "test": test} for notebook, what, test in HELD])

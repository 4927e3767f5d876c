"""Faults that speculative decoders and T5 decoders really had, and the test that each would fail."""

import ast
import pathlib

import pytest

TESTS = pathlib.Path(__file__).parent

FAULTS = {
    "text goes on after an EOS accepted in the middle of a block": "decoding_end::test_eos_at_every_place_of_a_block",
    "output longer than allowed": "decoding_end::test_never_longer_than_max_length",
    "no EOS id crashes": "decoding_end::test_never_longer_than_max_length",
    "a length limit hides a stop earlier in the block": "decoding_end::test_eos_just_before_the_limit_is_the_reason",
    "minimum length ignored at later places of a block": "distribution::test_sequences_have_the_target_law",
    "tokens behind an EOS counted as accepted": "decoding_end::test_eos_at_every_place_of_a_block",
    "after full acceptance the draft never saw its last guess": "decoding::test_a_draft_equal_to_the_target_is_always"
    "_accepted",
    "positions wrong after n accepted": "decoding::test_greedy_equals_plain_decoding",
    "rejected slots seen, or counted in the softmax": "decoding::test_what_lies_behind_the_position_is_never_read",
    "one offset for all rows": "decoding::test_rows_that_accept_nothing_and_everything_side_by_side",
    "the first guess never verified": "decoding::test_a_wrong_first_guess_rejects_the_block",
    "rows swapped for gamma above 2": "decoding_rules::test_greedy_equals_plain_decoding_under_every_rule",
    "cached logits differ from uncached": "models_t5::test_one_token_at_a_time_is_teacher_forcing",
    "a slice that starts too late is clamped": "decoding_end::test_never_longer_than_max_length",
    "greedy guesses with a softmax q": "distribution::test_a_wrong_decoder_is_rejected",
    "q raw though guesses were filtered": "distribution::test_a_wrong_decoder_is_rejected",
    "settings applied to one model only": "decoding::test_top_k_1_at_temperature_1_is_argmax",
    "order of filters": "sampling::test_filters_see_temperature_first",
    "residual zero everywhere": "verification::test_residual_of_equal_laws_is_p",
    "NaN logits give an id out of range": "decoding_end::test_nan_logits_end_the_row_or_only_its_guesses",
    "temperature 0 by division": "decoding::test_greedy_drafts_for_a_sampling_target_and_the_reverse_run",
    "residual softmaxed": "distribution::test_a_wrong_decoder_is_rejected",
    "top-p over the wrong axis": "sampling::test_rows_have_their_own_settings",
    "alpha without q": "decoding_rules::test_the_share_of_guesses_that_pass_is_alpha",
    "a row depends on its neighbours": "decoding::test_a_row_alone_equals_the_row_in_a_batch",
    "a seed without effect": "decoding::test_seeds_matter_and_repeat",
    "the same key in every batch": "generation::test_rows_depend_on_their_index_and_not_on_the_batch_size",
    "vocabularies of different sizes": "decoding_end::test_vocabularies_that_differ_are_refused",
    "start token taken for padding": "decoding::test_a_start_token_other_than_padding",
    "the draft got no encoder mask": "decoding::test_padded_encoder_rows_do_not_hurt_acceptance",
    "output changes with encoder padding": "decoding::test_padding_the_encoder_input_changes_nothing",
    "ragged inputs in a batch": "decoding::test_greedy_equals_plain_decoding",
    "rows that end at different times": "decoding::test_rows_that_accept_nothing_and_everything_side_by_side",
    "float16 overflows in the feed-forward": "models_t5::test_dtypes_that_t5_cannot_run_in_are_refused",
    "relative bias ignores the cache's offset": "models_t5::test_blocks_with_rejected_guesses_are_teacher_forcing",
    "fewer scores than tokens": "decoding::test_plain_greedy_is_the_argmax_of_teacher_forcing",
    "a repetition rule that does not see the block's guesses": "random_search::test_a_few_configurations",
    "near ties in low precision": "decoding_rules::test_bfloat16_tokens_are_near_the_teacher_forced_maximum",
    "ties of the maximum": "sampling::test_a_tie_of_the_maximum_is_the_lowest_id_in_every_form",
    "slower than plain decoding, unnoticed": "cli::test_slower_than_plain_decoding_is_said",
    "compiled anew in every call": "decoding_cost::test_one_compilation_per_shape",
    "rates of nothing": "decoding::test_rates_are_defined_when_nothing_was_drafted",
    "times that include compilation": "timing::test_interleaved_warms_up_alternates_and_takes_medians",
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_test_knows_this_fault(kind):
    module, name = FAULTS[kind].split("::")
    tree = ast.parse((TESTS / f"{module}_test.py").read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}

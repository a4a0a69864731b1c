from __future__ import annotations

from dataclasses import replace

from support.mla_case import TRUE

from radix_mla.attention.forms import CPU_RATES, H200_RATES, FormChooser, rates_of

CHOOSER = FormChooser(TRUE, 32_768, CPU_RATES)


def test_few_new_tokens_are_absorbed_and_prefill_is_not() -> None:
    assert CHOOSER.choose(1, 2_000) == "absorbed"
    assert CHOOSER.choose(16, 1_500) == "absorbed"
    assert CHOOSER.choose(2_000, 0) == "non_absorbed"
    assert CHOOSER.choose(2_000, 8_000) == "non_absorbed"
    assert CHOOSER.choose(500, 60) == "one_shot", "a merge costs more than a short prefix's mask"
    assert CHOOSER.choose(2_000, 32_000) == "non_absorbed", "does not fit the workspace"


def test_the_forms_cross_once_as_new_tokens_grow() -> None:
    for context in (500, 2_000, 30_000):
        forms = [CHOOSER.choose(n, context) for n in range(1, 1_000, 7)]
        switch = forms.count("absorbed")
        assert set(forms[:switch]) == {"absorbed"}
        assert "absorbed" not in forms[switch:]
        assert 50 <= 1 + 7 * switch <= 400, "FLOPs alone cross near 170"


def test_forced_form() -> None:
    for form in ("absorbed", "non_absorbed", "one_shot"):
        assert FormChooser(TRUE, 4_096, CPU_RATES, form).choose(10, 20) == form


def test_forced_one_shot_falls_back_where_it_cannot_fit() -> None:
    chooser = FormChooser(TRUE, 64, CPU_RATES, "one_shot")
    assert chooser.choose(4, 60) == "one_shot"
    assert chooser.choose(4, 61) == "non_absorbed"


def test_decode_is_absorbed() -> None:
    assert (
        FormChooser(TRUE, 64, CPU_RATES, "non_absorbed").choose(1, 9, is_decode=True) == "absorbed"
    )


def test_h200_table_chooses_what_was_fastest() -> None:
    """Cases of tests/bench/gpu/calibrate_forms.py in which one form won clearly."""
    rates = replace(H200_RATES, captured_tokens=0)
    for heads, num_new, num_context, best in (
        (16, 16, 2_048, "absorbed"),
        (16, 128, 32_768, "absorbed"),
        (16, 512, 32_768, "non_absorbed"),
        (16, 2_048, 8_192, "one_shot"),
        (16, 2_048, 0, "non_absorbed"),
        (128, 48, 8_192, "absorbed"),
        (128, 512, 8_192, "one_shot"),
        (128, 512, 32_768, "non_absorbed"),
    ):
        chooser = FormChooser(replace(TRUE, num_heads=heads), 32_768, rates)
        assert chooser.choose(num_new, num_context) == best, (heads, num_new, num_context)


def test_rates_of_a_device() -> None:
    assert rates_of("cpu") is CPU_RATES
    assert rates_of("cuda:0") is H200_RATES

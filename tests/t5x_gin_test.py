"""gin/t5x and configs/t5x: every file parses, against t5x's names as recorded and as they are."""

import copy
import importlib
import importlib.util
import inspect
import pathlib
import re
import shlex

import gin
import pytest
from t5x_gin_parser import RECORD, ROOT, make_launch, read_command, run, statements, write_stand_ins

FOLDERS = ("gin/t5x", "configs/t5x")
FILES = sorted(str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).iterdir())
RUNS = [name for name in FILES if name.startswith("configs/")]
DECODING_RUNS = [name for name in RUNS if "finetune" not in name]
DRAFTS = [name for name in FILES if name.startswith("gin/t5x/draft_")]
SIZES = [name for name in FILES if re.match(r"gin/t5x/(t5_1_|mt5_)", name)]
SMALL, XXL, DRAFT, INFER = (
    "gin/t5x/t5_1_1_small.gin",
    "gin/t5x/t5_1_1_xxl.gin",
    "gin/t5x/draft_t5_1_1_small.gin",
    "configs/t5x/infer.gin",
)
VALUES = {
    "CHECKPOINT_PATH": "'c'",
    "DRAFT_CHECKPOINT_PATH": "'d'",
    "INFER_OUTPUT_DIR": "'o'",
    "EVAL_OUTPUT_DIR": "'o'",
    "MODEL_DIR": "'m'",
    "MIXTURE_OR_TASK_NAME": "'task'",
    "TASK_FEATURE_LENGTHS": "{'inputs': 8, 'targets': 8}",
    "FEATURE_LENGTHS": "{'inputs': 8, 'targets': 8}",
    "TEXT_FILE": "'lines.txt'",
    "TF_EXAMPLE_FILE_PATHS": "['a']",
    "TF_EXAMPLE_FILE_TYPE": "'tfrecord'",
}


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory):
    return write_stand_ins(tmp_path_factory.mktemp("t5x_root"))


def script_of(name):
    return "eval" if "eval" in name else "train" if "finetune" in name else "infer"


def header(name):
    return re.match(r"(#.*\n)+", (ROOT / name).read_text())[0]


def required(name):
    return re.search(r"# Required macros: (.*)\.", header(name))[1].split(", ")


def values(*macros):
    return [f"{macro} = {VALUES[macro]}" for macro in macros]


def read_header(name):
    return read_command(shlex.split(re.search(r"#   (python (?:.*\\\n)*.*)", header(name))[1].replace("\\\n#", "")))


def target_of(draft):
    """The largest target of a draft's family."""
    family = re.search(r"draft_(.*)_\w+\.gin", draft)[1]
    return f"gin/t5x/{family}_{'11b' if family == 't5_1_0' else 'xxl'}.gin"


def plain_launch(name, size=SMALL):
    return make_launch([size, name], *values(*required(name)), script=script_of(name))


def draft_launch(name, draft=DRAFT):
    given = values(*required(name), "DRAFT_CHECKPOINT_PATH")
    return make_launch([target_of(draft), name, draft], *given, script=script_of(name))


def launches():
    """Name -> launch, of all that must parse."""
    found = {f"{size} {INFER}": plain_launch(INFER, size) for size in SIZES}
    found |= {f"{SMALL} {name}": plain_launch(name) for name in RUNS}
    found |= {f"{XXL} {name}": plain_launch(name, XXL) for name in DECODING_RUNS}
    found |= {f"{draft} {INFER}": draft_launch(INFER, draft) for draft in DRAFTS}
    found |= {f"{DRAFT} {name}": draft_launch(name) for name in DECODING_RUNS}
    found |= {f"header {name}": read_header(name) for name in RUNS}
    own = make_launch(
        ["t5x/examples/t5/t5_1_1/xxl.gin", "t5x/configs/runs/infer.gin", DRAFT],
        *values("DRAFT_CHECKPOINT_PATH", *required(INFER)),
        "DROPOUT_RATE = 0.0",
    )
    flag = "partitioning.PjitPartitioner.num_partitions = 2"
    return {**found, "own": own, "own, partitioned": {**own, "bindings": [*own["bindings"], flag]}}


@pytest.fixture(scope="module")
def parsed(stand_ins):
    cases = launches()
    return dict(zip(cases, run(cases.values(), stand_ins), strict=True))


def test_every_launch_parses(parsed):
    assert {name: result["error"] for name, result in parsed.items() if "error" in result} == {}
    used = {file for launch in launches().values() for file in launch["files"]}
    included = {file for name in FILES for file in statements((ROOT / name).read_text())["includes"]}
    assert set(FILES) <= used | included


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_those_of_the_models(name, parsed):
    ours = statements((ROOT / "gin" / pathlib.Path(name).name).read_text())["bindings"]
    config = parsed[f"{name} {INFER}"]["module"]
    for key, value in ours.items():
        assert repr(config[key.rsplit(".", 1)[1]]).strip("[]") == value.strip("(,)"), key
    assert config["dtype"] == "bfloat16" and config["dropout_rate"] == 0.0


@pytest.mark.parametrize("name", DRAFTS)
def test_a_draft_has_the_sizes_of_its_name_and_the_target_keeps_its_own(name, parsed):
    result = parsed[f"{name} {INFER}"]
    assert result["draft_module"] == parsed[f"{name.replace('draft_', '')} {INFER}"]["module"]
    assert result["module"] == parsed[f"{target_of(name)} {INFER}"]["module"]
    model = result["given"]["model"]
    assert model["class"] == "SpeculativeEncoderDecoderModel"
    for module in ("module", "draft_module"):
        assert model[module]["config"] == {"class": "T5Config", **result[module]}


@pytest.mark.parametrize("name", DECODING_RUNS)
def test_a_draft_changes_the_model_and_its_checkpoint_alone(name, parsed):
    plain, drafted = (copy.deepcopy(parsed[f"{size} {name}"]["given"]) for size in (XXL, DRAFT))
    restore, added = plain["restore_checkpoint_cfg"], drafted["restore_checkpoint_cfg"].pop("state_transformation_fns")
    assert restore.pop("state_transformation_fns") is None and restore["dtype"] == "bfloat16"
    assert added == [{"name": "restore_draft", "bound": {"path": "d", "dtype": "bfloat16"}}]
    speculation = {"gamma": 4, "rule": None, "lenience": 1.0, "draft_temperature": None, "seed": 0}
    speculation["prompt_with_targets"] = False
    before, after = plain.pop("model"), drafted.pop("model")
    for given in (plain, drafted):
        given["dataset_cfg"].pop("mixture_or_task_name")  # of a text file: its vocabularies come from the model
    assert plain == drafted
    assert after.pop("draft_module") and after.items() >= speculation.items()
    assert after.pop("partitioner") == drafted["partitioner"]
    assert after.pop("drafter")["name"] == "specdec_jax.drafters.model.ModelDrafter"
    for key in ["class", *speculation]:
        after.pop(key)
    assert before.pop("class") == "EncoderDecoderModel" and before == after
    assert after["decode_fn"]["bound"] == {"temperature": 0.0, "topk": 0, "topp": 0.0, "rescale_log_probs": False}
    assert after["default_decoder_params"]["num_decodes"] == 1


def test_a_users_own_launch_keeps_its_settings(parsed):
    for name, partitions in (("own", 1), ("own, partitioned", 2)):
        given = parsed[name]["given"]
        assert given["model"]["class"] == "SpeculativeEncoderDecoderModel"
        assert given["model"]["decode_fn"] == {"name": "temperature_sample", "bound": {}}
        assert given["model"]["loss_normalizing_factor"] is None and given["mode"] == "predict"
        assert given["partitioner"] == given["model"]["partitioner"]
        assert given["partitioner"]["num_partitions"] == partitions


def test_text_files_become_a_task_with_the_models_vocabularies(parsed):
    given = parsed[f"{DRAFT} configs/t5x/infer_text.gin"]["given"]
    task = given["dataset_cfg"]["mixture_or_task_name"]
    assert (task["path"], task["prefix"], given["dataset_cfg"]["split"]) == ("lines.txt", "", "infer")
    assert {feature["vocabulary"]["model"]["class"] for feature in task["features"].values()} == {
        given["model"]["class"]
    }


@pytest.mark.parametrize("name", [name for name in RUNS if "finetune" in name])
def test_fine_tuning_starts_from_the_public_checkpoint_of_the_size(name, parsed):
    given = parsed[f"{SMALL} {name}"]["given"]
    restore = given["checkpoint_cfg"]["restore"]
    assert restore["path"] == "gs://t5-data/pretrained_models/t5x/t5_1_1_small/checkpoint_1000000"
    assert given["model"]["loss_normalizing_factor"] == 2048 * 114
    assert given["model"]["module"]["config"]["dropout_rate"] == 0.1
    task = given["train_dataset_cfg"]
    assert (task["batch_size"], task["use_cached"], task["module"]) == (128, False, "t5.data.tasks")
    assert given["trainer_cls"]["bound"]["learning_rate_fn"]["base_learning_rate"] == 0.001


def test_required_macros_are_required(stand_ins):
    full = {(macro, name): plain_launch(name) for name in RUNS for macro in required(name)}
    full["DRAFT_CHECKPOINT_PATH", DRAFT] = draft_launch(INFER)
    cases = {
        (macro, name): {**case, "bindings": [one for one in case["bindings"] if not one.startswith(f"{macro} ")]}
        for (macro, name), case in full.items()
    }
    for (macro, name), result in zip(cases, run(cases.values(), stand_ins), strict=True):
        assert re.match(f"ValueError: {macro}/.*not subsequently overridden", result["error"]), (name, result)


@pytest.mark.parametrize("name", RUNS)
def test_headers_are_true(name, parsed):
    text = header(name)
    for part in ("# RUN: ", "#   python -m t5x.", "# Hardware: ", "# Prints: "):
        assert part in text
    assert f"--gin_file={name} " in text
    macros = parsed[f"{DRAFT} {name}" if name in DECODING_RUNS else f"{SMALL} {name}"]["macros"]
    overridden = re.search(r"# Commonly overridden: (.*?)\n# [A-Z]", text, re.DOTALL)[1]
    named = re.findall(r"\b([A-Z][A-Z_]+)(?: \(([^,)]*))?", overridden)
    assert len(named) >= 7
    for macro, default in named:
        assert macro in macros, macro
        assert not default or gin.config.parse_value(macros[macro]) == gin.config.parse_value(default), macro


def typos(text):
    """The file's text with one name misspelt: a parameter, a configurable, a macro."""
    code = re.compile(r"^[ \w/.]*?\.(\w+) =|^  (\w+) =|^[\w/]+\.(\w+):|@[\w./]*\.(\w+)|%([A-Z_]+)\b", re.MULTILINE)
    for match in code.finditer(text):
        line = text[text.rfind("\n", 0, match.start()) + 1 : match.start()]
        end = match.end(match.lastindex)
        if "#" not in line:
            yield f"{match[match.lastindex]}x", f"{text[:end]}x{text[end:]}"


def test_a_misspelt_name_is_caught(stand_ins, tmp_path):
    repeated = set(DRAFTS) - {DRAFT, "gin/t5x/draft_mt5_small.gin"}
    cases = {}
    for name in sorted(set(FILES) - repeated):
        if name == "gin/t5x/finetuning.gin":
            full = plain_launch("configs/t5x/finetune_ende.gin")
        elif name in DRAFTS:
            full = draft_launch(INFER, name)
        else:
            full = draft_launch(name if name in DECODING_RUNS else INFER)
        for number, (word, text) in enumerate(typos((ROOT / name).read_text())):
            place = tmp_path / f"{pathlib.Path(name).stem}_{number}"
            (place / name).parent.mkdir(parents=True)
            (place / name).write_text(text)
            cases[name, number, word] = {**full, "search_paths": [str(place), str(ROOT)]}
    assert len(cases) > 100
    results = dict(zip(cases, run(cases.values(), stand_ins), strict=True))
    missed = {case: result.get("error") for case, result in results.items() if case[2] not in result.get("error", "")}
    assert missed == {}


def test_an_unknown_file_module_or_macro_is_caught(stand_ins, tmp_path):
    texts = {
        "include 'gin/t5x/no_such.gin'\n": "no_such",
        "from __gin__ import dynamic_registration\nutils.DatasetConfig.seed = 1\n": "'utils' was not provided",
        "from __gin__ import dynamic_registration\nfrom t5x import utilities\n": "utilities",
        "GAMMA = %NO_SUCH\n": "NO_SUCH",
    }
    cases = []
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.gin").write_text(text)
        full = draft_launch(INFER)
        cases.append({**full, "files": [*full["files"], str(tmp_path / f"{number}.gin")]})
    for expected, result in zip(texts.values(), run(cases, stand_ins), strict=True):
        assert expected in result["error"]


# ---------------------------------------------------------------------------------------- with t5x


def signature(qualified):
    module, name = qualified.rsplit(".", 1)
    return list(inspect.signature(getattr(importlib.import_module(module), name)).parameters)


@pytest.mark.t5x
def test_the_record_is_t5xs():
    pytest.importorskip("t5x", reason="t5x is not installed")
    root = pathlib.Path(importlib.util.find_spec("t5x").submodule_search_locations[0]).parent
    for qualified, parameters in RECORD["configurables"].items():
        assert signature(qualified) == parameters.split(), qualified
    for name, file in RECORD["gin_files"].items():
        assert statements((root / name).read_text()) == file, name


@pytest.mark.t5x
def test_every_launch_parses_with_t5x(parsed):
    pytest.importorskip("t5x", reason="t5x is not installed")
    root = pathlib.Path(importlib.util.find_spec("t5x").submodule_search_locations[0]).parent
    cases = launches()
    results = dict(zip(cases, run(cases.values(), root, stubs=False), strict=True))
    assert {name: result["error"] for name, result in results.items() if "error" in result} == {}
    for name, result in results.items():
        assert result["macros"] == parsed[name]["macros"]
        for module in ("module", "draft_module"):
            found, stubbed = result.get(module, {}), parsed[name].get(module, {})
            assert {key: found[key] for key in stubbed if stubbed[key] is not None} == {
                key: value for key, value in stubbed.items() if value is not None
            }

"""The command `check` on notebooks as trainees leave them: names bound again, catch_up, several files and folders."""

import json
from pathlib import Path

from dlojz_tp.judging.grading import command
from dlojz_tp.works import source
from tests.test_grading import RIGHT, check, notebook


def test_the_grader_takes_the_binding_that_the_check_saw(tmp_path):
    work = source.find("00_welcome")
    head, body = RIGHT.split("def distributed_sum")
    check_1 = "tp.check(1, describe_machine)\ndescribe_machine()"
    again = "for describe_machine in (True, False):\n    print(describe_machine)"
    path = notebook(tmp_path, head, check_1, again, "def distributed_sum" + body, "tp.check(2, distributed_sum)")
    assert [command.judge_file(work, path, k).verdict for k in (1, 2)] == ["pass", "pass"]
    path = notebook(tmp_path, "tp.check(1, describe_machine)", head)
    assert command.judge_file(work, path, 1).passed, "what stands below alone counts too"


def test_the_grader_knows_what_catch_up_gave(tmp_path):
    work = source.find("00_welcome")
    hole = "def describe_machine():\n    todo(1)", "tp.check(1, describe_machine)"
    own = RIGHT.split("def distributed_sum")[0], "tp.check(1, describe_machine)"
    for cells, word in (
        ((hole[0], "tp.catch_up(2)", hole[1]), "by catch_up"),
        ((*hole, "tp.catch_up(1)"), "by catch_up"),  # and the check ran once more
        (("tp.catch_up(1)", *own), "pass"),
        ((*own, "tp.catch_up(1)"), "pass"),
    ):
        assert command.judge_file(work, notebook(tmp_path, *cells), 1).verdict == word, cells
    uses = "def distributed_sum(values):\n    describe_machine()\n    total = values[dist.get_rank()::2].sum()"
    cells = *hole, uses.replace("2]", "dist.get_world_size()]") + "\n    dist.all_reduce(total)\n    return total"
    assert command.judge_file(work, notebook(tmp_path, *cells, "tp.check(2, distributed_sum)"), 2).verdict == "not done"
    assert command.judge_file(work, notebook(tmp_path, *cells, "tp.catch_up(1)"), 2).passed


def test_what_is_further_stands_in_for_the_core(tmp_path):
    work = source.find("15_pipeline_under_the_hood")
    trainee = json.loads((source.NOTEBOOKS / f"{work.name}.ipynb").read_text())
    codes = ["".join(cell["source"]) for cell in trainee["cells"] if cell["cell_type"] == "code"]
    own = [source.without_markers(work.balises[4].code) if "todo(4)" in code else code for code in codes]
    path = notebook(tmp_path, *own)
    assert command.judge_file(work, path, 4).passed, "it uses balise 2, which is further"
    assert command.judge_file(work, path, 2).verdict == "not done"
    path = notebook(tmp_path, *(code for code in own if 'catch_up("further")' not in code))
    assert command.judge_file(work, path, 4).verdict == "not done"


def test_several_files_and_folders(tmp_path):
    opens, right = "tp = course.open('00_welcome')", RIGHT.split("def distributed_sum")[0]
    for name, cells in {
        "ann/mine.ipynb": (opens, right),
        "ann/other.ipynb": ("tp = course.open('05_dataloader')",),
        "bob/mine.ipynb": (
            opens,
            "import threading\n" + right + "\nthreading.Thread(target=input, daemon=True).start()",
        ),
        "cat/mine.ipynb": (opens, "def describe_machine():\n    return 1"),
        "cat/.ipynb_checkpoints/mine.ipynb": (opens,),
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        notebook(tmp_path, *cells, name=name)
    other = tmp_path / "ann" / "other.ipynb"
    status, out, err = check("00_welcome", tmp_path, other, "--balise", "1", "--json")
    rows = json.loads(out)
    assert [Path(row["file"]).parent.name for row in rows] == ["ann", "bob", "cat"]
    assert [row["verdict"] for row in rows] == ["pass", "pass", "fail"] and rows[2]["failed"] and rows[2]["got"]
    assert status == 2 and err.strip().endswith("other.ipynb: is a notebook of 05_dataloader, not of 00_welcome")
    (tmp_path / "empty").mkdir()
    status, _, err = check("00_welcome", tmp_path / "empty")
    assert status == 2 and "no notebook of 00_welcome in this folder" in err

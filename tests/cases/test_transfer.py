"""Export and import of sets of cases: into an empty project, twice, and into a set that differs."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone

from inference_site.accounts.models import ApiKey, Project
from inference_site.batches.models import Batch, BatchStatus
from inference_site.cases import transfer
from inference_site.cases.models import (
    Case,
    CaseResult,
    CaseRun,
    CaseSet,
    Judge,
    RunState,
    SavedAnswer,
    Verdict,
)
from inference_site.core.storage.postgresql import release_connection_after

pytestmark = pytest.mark.django_db(transaction=True)


def moved(folder: Path, project: str) -> str:
    out = StringIO()
    call_command("import_project", project, folder, "--create", stdout=out)
    return out.getvalue()


def answers(*sources: str) -> list[SavedAnswer]:
    return [SavedAnswer(source, {"input": source}, source.upper()) for source in sources]


@pytest.fixture
def folder(api_key: tuple[ApiKey, str], tmp_path: Path) -> Path:
    """An export of a set of three cases with two runs that have ended, and one that runs."""
    key, _ = api_key
    case_set = CaseSet.objects.create(
        project=key.project, name="sums & co.", endpoint="/v1/responses"
    )
    case_set.add(answers("resp_a", "resp_b", "resp_c"))
    batch = Batch.objects.create(
        public_id="batch_1",
        project=key.project,
        api_key=key,
        endpoint="/v1/responses",
        status=BatchStatus.COMPLETED,
        window_s=60,
        expires_at=timezone.now(),
    )
    for number, state in ((1, RunState.ENDED), (2, RunState.RUNNING), (3, RunState.ENDED)):
        run = CaseRun.objects.create(
            case_set=case_set,
            number=number,
            model=f"m{number}",
            state=state,
            judge=Judge.EXACT,
            overrides={"temperature": 0},
            batch=batch,
            ended_at=timezone.now(),
        )
        for case in case_set.cases.all():
            verdict = Verdict.PASSED if case.number == 1 else Verdict.FAILED
            CaseResult.objects.create(run=run, case=case, text=case.source, verdict=verdict)
    folder = tmp_path / "export"
    call_command("export_project", key.project.name, folder, stdout=StringIO())
    CaseSet.objects.all().delete()
    Batch.objects.all().delete()
    return folder


def test_a_set_moves_with_its_cases_and_the_runs_that_have_ended(folder: Path) -> None:
    report = moved(folder, "new")
    assert "1 × case_set\n3 × case\n2 × case_run\n" in report
    case_set = CaseSet.objects.get(project__name="new", name="sums & co.")
    assert list(case_set.cases.values_list("number", "source", "expected")) == [
        (1, "resp_a", "RESP_A"),
        (2, "resp_b", "RESP_B"),
        (3, "resp_c", "RESP_C"),
    ]
    last, first = case_set.runs.all()
    assert (first.number, last.number, last.model, last.state) == (1, 3, "m3", RunState.ENDED)
    assert last.batch is not None
    assert last.batch.project == case_set.project
    assert last.overrides == {"temperature": 0}
    assert last.verdicts() == {"passed": 1, "failed": 2}
    assert last.results.get(case__source="resp_b").text == "resp_b"


def test_a_second_import_adds_nothing(folder: Path) -> None:
    moved(folder, "new")
    report = moved(folder, "new")
    for kind, count in (("case_set", 1), ("case", 3), ("case_run", 2)):
        assert f"0 × {kind}, {count} known already" in report
    assert [model.objects.count() for model in (CaseSet, Case, CaseRun, CaseResult)] == [1, 3, 2, 6]


def test_of_imports_at_once_each_object_is_stored_once(folder: Path) -> None:
    def once(number: int) -> str:
        """Import a copy; return the error, if any."""
        copy = copytree(folder, folder.with_name(f"copy-{number}"))
        with release_connection_after():
            try:
                moved(copy, "new")
            except CommandError as exc:
                return str(exc)
            return ""

    Project.objects.create(name="new")
    with ThreadPoolExecutor(4) as pool:
        errors = list(pool.map(once, range(4)))
    assert "" in errors
    assert all("contradict what is stored" in error for error in errors if error)
    moved(folder, "new")
    counts = [model.objects.count() for model in (Batch, CaseSet, Case, CaseRun, CaseResult)]
    assert counts == [1, 1, 3, 2, 6]
    keys = ApiKey.objects.filter(project__name="new")
    assert [(key.name, key.secrets.count()) for key in keys] == [("import", 0)]


def test_a_set_of_that_name_gets_what_it_lacks(folder: Path) -> None:
    project = Project.objects.create(name="new")
    case_set = CaseSet.objects.create(project=project, name="sums & co.", endpoint="/v1/responses")
    case_set.add(answers("resp_own", "resp_b"))
    CaseRun.objects.create(case_set=case_set, number=1, model="own")
    assert "2 × case, 1 known already\n2 × case_run\n" in moved(folder, "new")
    assert list(case_set.cases.values_list("number", "source")) == [
        (1, "resp_own"),
        (2, "resp_b"),
        (3, "resp_a"),
        (4, "resp_c"),
    ]
    assert list(case_set.runs.values_list("number", "model")) == [(3, "m3"), (2, "m1"), (1, "own")]
    assert case_set.runs.get(model="m3").results.get(case__source="resp_b").text == "resp_b"


def changed(kind: str, **fields: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda line: {**line, **fields} if line["kind"] == kind else line


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed("case_set", endpoint="/v1/spells"), "no endpoint /v1/spells"),
        (changed("case", case_set="other"), "has no set of cases other"),
        (changed("case_run", case_set="other"), "has no set of cases other"),
        (changed("case_run", number=2**31), "'number'"),
        (changed("case", expected="a\0b"), "has the character NUL"),
        (changed("case", source="resp_a\n"), "'source'"),
        (changed("case_run", results=[{"source": "resp_a"}]), "'results.0.text'"),
        (changed("case_run", created_at="9999-12-31T23:59:59-23:00"), "cannot be stored"),
    ],
)
def test_a_changed_export_is_refused(
    folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]], message: str
) -> None:
    path = folder / "objects.jsonl"
    lines = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(CommandError, match=message):
        moved(folder, "new")
    assert not CaseRun.objects.exists()


def test_a_set_of_another_endpoint_or_with_too_many_cases_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = Project.objects.create(name="new")
    given = {"project": project, "name": "sums & co."}
    case_set = CaseSet.objects.create(**given, endpoint="/v1/embeddings")
    with pytest.raises(CommandError, match="for /v1/embeddings; rename it"):
        moved(folder, "new")
    case_set.delete()
    monkeypatch.setattr(transfer, "MAX_CASES", 2)
    with pytest.raises(CommandError, match="2 cases at most"):
        moved(folder, "new")
    assert not Case.objects.exists()

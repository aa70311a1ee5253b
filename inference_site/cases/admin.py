"""Admin of sets of cases: their cases, runs on other models, and the answers side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
import redis.exceptions
from django import forms
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db.models import Avg, Count, Q, QuerySet, Sum
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import get_object_or_404
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.text import normalize_newlines
from django.views.decorators.http import require_GET, require_POST
from unfold.widgets import (
    UnfoldAdminSelectWidget,
    UnfoldAdminTextareaWidget,
)

from inference_site.accounts.keys import caller_of_key
from inference_site.accounts.models import ApiKey
from inference_site.batches.models import Batch
from inference_site.cases.judging import NoRule, check_rule
from inference_site.cases.models import (
    LONGEST_JUDGEMENT,
    MAX_CASES,
    Case,
    CaseResult,
    CaseRun,
    CaseSet,
    Judge,
    RunState,
    Verdict,
)
from inference_site.cases.running import begin
from inference_site.cases.sources import may_save
from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.model_labels import cost_label
from inference_site.core.admin_pages.base_admin import (
    RelatedFilter,
    SiteAdmin,
    TextField,
    id_of,
    log_action,
    require_free_name,
)
from inference_site.core.admin_pages.labels import may_see_content, preview, status_label
from inference_site.core.errors.api_errors import ApiError
from inference_site.core.errors.exceptions import api_error
from inference_site.core.storage.fields import replace_nul
from inference_site.core.storage.postgresql import release_connection_after

MOST_COMPARED = 4
_MOST_RUNS = 50


class RunForm(forms.Form):
    """The form of a new run: the model that answers, changed settings, and what judges."""

    model = forms.ChoiceField(widget=UnfoldAdminSelectWidget)
    key = forms.ModelChoiceField(
        ApiKey.objects.none(),
        empty_label=None,
        widget=UnfoldAdminSelectWidget,
        help_text="The run counts against its limits and budget.",
    )
    overrides = forms.CharField(
        label="Other settings",
        required=False,
        max_length=LONGEST_JUDGEMENT,
        widget=UnfoldAdminTextareaWidget(attrs={"rows": 2}),
        help_text='Fields of the requests to replace, as JSON: {"temperature": 0}.',
    )
    judge = forms.ChoiceField(
        choices=Judge.choices, label="An answer passes if", widget=UnfoldAdminSelectWidget
    )
    rule = TextField(
        required=False,
        max_length=LONGEST_JUDGEMENT,
        widget=UnfoldAdminTextareaWidget(attrs={"rows": 3}),
        help_text="The regular expression, the JSON schema, or in words when an answer is right.",
    )
    judge_model = forms.ChoiceField(
        label="Judging model", required=False, widget=UnfoldAdminSelectWidget
    )

    def __init__(self, case_set: CaseSet, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        keys: Any = self.fields["key"]
        usable = ApiKey.objects.filter(project=case_set.project_id, revoked_at=None)
        keys.queryset = usable.order_by("name")
        project = case_set.project.name
        names = [spec.id for spec in catalogue().listed(project)]
        names += [route.id for route in catalogue().listed_routes(project)]
        models: Any = self.fields["model"]
        judges: Any = self.fields["judge_model"]
        models.choices = [(name, name) for name in names]
        judges.choices = [("", "—"), *models.choices]

    def clean_overrides(self) -> dict[str, Any]:
        """Return the fields."""
        text = self.cleaned_data["overrides"].strip()
        try:
            given = orjson.loads(text) if text else {}
        except orjson.JSONDecodeError as exc:
            raise forms.ValidationError(f"This is not JSON: {exc}.") from exc
        if not isinstance(given, dict) or "model" in given:
            raise forms.ValidationError("Write a JSON object, without the model.")
        return given

    def clean(self) -> dict[str, Any]:
        """Demand what the judge needs."""
        given: dict[str, Any] = super().clean() or {}
        try:
            check_rule(given.get("judge", ""), given.get("rule", ""))
        except NoRule as exc:
            self.add_error("rule", str(exc))
        if given.get("judge") == Judge.MODEL and not given.get("judge_model"):
            self.add_error("judge_model", "Choose the model that judges.")
        return given


class CaseSetForm(forms.ModelForm[CaseSet]):
    """The form that renames a set."""

    class Meta:
        model = CaseSet
        fields = ("name",)

    def clean(self) -> dict[str, Any]:
        """Demand a name that no other set of the project has."""
        given: dict[str, Any] = super().clean() or {}
        require_free_name(self, "set")
        return given


@admin.register(CaseSet)
class CaseSetAdmin(SiteAdmin):
    """The sets of all projects. The page of one has its cases and runs."""

    list_display = ("name", "project", "endpoint", "case_count", "run_count", "created_at")
    list_filter = (("project", RelatedFilter),)
    list_select_related = ("project",)
    search_fields = ("name",)
    form = CaseSetForm
    change_form_template = "cases/set.html"
    how_to_add = "Open a stored answer, or a list of them, and save it as a case."

    def has_add_permission(self, request: HttpRequest) -> bool:
        """No: a set begins with its first case."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Only together with the permission to see content, as for the cases of a set."""
        return may_save(request)

    def get_queryset(self, request: HttpRequest) -> QuerySet[CaseSet]:
        rows: QuerySet[CaseSet] = super().get_queryset(request)
        return rows.annotate(held=Count("cases", distinct=True), ran=Count("runs", distinct=True))

    @admin.display(description="cases")
    def case_count(self, case_set: Any) -> str:
        return f"{case_set.held:,}"

    @admin.display(description="runs")
    def run_count(self, case_set: Any) -> str:
        return f"{case_set.ran:,}"

    def get_urls(self) -> list[URLPattern]:
        """Add the actions and the comparison."""
        view, name = self.admin_site.admin_view, "cases_caseset_"
        own = [
            path("<int:pk>/run/", view(require_POST(self.run_view)), name=f"{name}run"),
            path("<int:pk>/cancel/", view(require_POST(self.cancel_view)), name=f"{name}cancel"),
            path("<int:pk>/case/", view(require_POST(self.case_view)), name=f"{name}case"),
            path("<int:pk>/compare/", view(require_GET(self.compare_view)), name=f"{name}compare"),
        ]
        return [*own, *super().get_urls()]

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """Show a set with its cases and runs."""
        context = dict(extra_context or {})
        case_set = self.get_object(request, object_id)
        if case_set is not None:
            context |= self._context(request, case_set, RunForm(case_set))
        return super().change_view(request, object_id, form_url, context)

    def _context(self, request: HttpRequest, case_set: CaseSet, form: RunForm) -> dict[str, Any]:
        runs = case_set.runs.select_related("batch", "judging", "created_by")
        cases = case_set.cases.all() if may_see_content(request) else []
        return {
            "case_set": case_set,
            "cases": [
                {"case": one, "asked": preview(_asked(one)), "expected": preview(one.expected)}
                for one in cases
            ],
            "case_count": case_set.cases.count(),
            "may_see": may_see_content(request),
            "may_run": may_save(request),
            "run_form": form,
            "runs": [_shown_run(run) for run in runs[:_MOST_RUNS]],
            "most_compared": MOST_COMPARED,
            "most_cases": MAX_CASES,
        }

    def run_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Begin a run, or show what is wrong with the form."""
        case_set = self._changeable(request, pk)
        form = RunForm(case_set, request.POST)
        if form.is_valid():
            given = form.cleaned_data
            run = CaseRun(
                case_set=case_set,
                created_by_id=int(request.user.pk or 0),
                **{name: given[name] for name in ("model", "overrides", "judge", "rule")},
                judge_model=given["judge_model"] if given["judge"] == Judge.MODEL else "",
            )
            with release_connection_after():
                caller = caller_of_key(given["key"].pk)
            try:
                if caller is None:
                    raise ApiError("This key is not valid any more.")
                begin(run, caller)
            except (ApiError, redis.exceptions.RedisError) as exc:
                form.add_error(None, api_error(exc).message)
            else:
                log_action(request, case_set, f"Began {run} on {run.model}.")
                return self._page_of(case_set)
        context = {
            **self.admin_site.each_context(request),
            **self._context(request, case_set, form),
            "opts": self.opts,
            "original": case_set,
            "title": str(case_set),
            "media": self.media,
        }
        return TemplateResponse(request, self.change_form_template, context)

    def cancel_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Cancel a run; the cases that run go on to their end."""
        case_set = self._changeable(request, pk)
        rows = case_set.runs.select_related("batch", "judging")
        run = get_object_or_404(rows, pk=id_of(request.POST.get("pk", "")))
        batch = run.batch if run.state == RunState.RUNNING else run.judging
        if run.state != RunState.ENDED and batch is not None:
            Batch.objects.cancel(batch)
            log_action(request, case_set, f"Cancelled {run}.")
        return self._page_of(case_set)

    def case_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Change the expected answer of a case, or delete the case."""
        case_set = self._changeable(request, pk)
        case = get_object_or_404(case_set.cases, pk=id_of(request.POST.get("pk", "")))
        if request.POST.get("delete"):
            case.delete()
            log_action(request, case_set, f"Deleted {case}.")
            return self._page_of(case_set)
        # An answer has lines that end with LF; browsers end those of a form with CR and LF.
        case.expected = normalize_newlines(replace_nul(request.POST.get("expected", "")))
        if not case_set.cases.filter(pk=case.pk).update(expected=case.expected):
            raise Http404  # It was deleted in this moment.
        log_action(request, case_set, f"Changed the expected answer of {case}.")
        messages.success(request, f"The expected answer of {case} was changed.")
        return self._page_of(case_set)

    def compare_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Show the answers of some runs side by side."""
        if not (self.has_view_permission(request) and may_see_content(request)):
            raise PermissionDenied
        case_set = get_object_or_404(CaseSet.objects.select_related("project"), pk=pk)
        given = request.GET.getlist("run")
        chosen = [int(one) for one in given if one.isdecimal() and len(one) < 10]
        rows = case_set.runs.order_by("number")
        runs = list((rows.filter(number__in=chosen) if chosen else rows.reverse())[:MOST_COMPARED])
        runs.sort(key=lambda run: run.number)
        results = CaseResult.objects.filter(run__in=runs)
        by_case: dict[int, dict[int, CaseResult]] = {}
        for result in results:
            by_case.setdefault(result.case_id, {})[result.run_id] = result
        context = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "original": case_set,
            "title": f"Runs of {case_set}",
            "case_set": case_set,
            "may_change": may_save(request),
            "runs": [_shown_run(run) for run in runs],
            "rows": [
                {
                    "case": case,
                    "asked": _asked(case),
                    "answers": [
                        _shown_result(run, by_case.get(case.pk, {}).get(run.pk)) for run in runs
                    ],
                }
                for case in case_set.cases.all()
            ],
        }
        return TemplateResponse(request, "cases/compare.html", context)

    def _changeable(self, request: HttpRequest, pk: int) -> CaseSet:
        if not may_save(request):
            raise PermissionDenied
        return get_object_or_404(CaseSet.objects.select_related("project"), pk=pk)

    def _page_of(self, case_set: CaseSet) -> HttpResponse:
        return HttpResponseRedirect(reverse("admin:cases_caseset_change", args=[case_set.pk]))


def _asked(case: Case) -> str:
    """Return the text of the newest message of a request."""
    given: Any = case.body.get("messages") or case.body.get("input") or ""
    if isinstance(given, str):
        return given
    newest: Any = next((one for one in reversed(given) if one.get("content")), {})
    content = newest.get("content", "")
    if isinstance(content, str):
        return content
    return " ".join(part.get("text", f"[{part.get('type')}]") for part in content)


def _shown_run(run: CaseRun) -> dict[str, Any]:
    verdicts = run.verdicts()
    sums: Mapping[str, Any] = run.results.aggregate(
        answered=Count("pk", filter=Q(error_code="")),
        failed=Count("pk", filter=~Q(error_code="")),
        input=Sum("input_tokens", default=0),
        output=Sum("output_tokens", default=0),
        mean_ms=Avg("duration_ms"),
        cost=Sum("cost", default=0),
    )
    batch = run.judging if run.state == RunState.JUDGING else run.batch
    progress = None
    if run.state != RunState.ENDED and batch is not None:
        progress = f"{batch.completed + batch.failed:,} of {batch.total:,}"
    return {
        "run": run,
        "state": status_label(run.state),
        "progress": progress,
        "passed": verdicts.get(Verdict.PASSED.value, 0),
        "judged": verdicts.get(Verdict.PASSED.value, 0) + verdicts.get(Verdict.FAILED.value, 0),
        "overrides": orjson.dumps(run.overrides).decode() if run.overrides else "",
        "shown_cost": cost_label(run.model, sums["cost"]),
        **sums,
    }


def _shown_result(run: CaseRun, result: CaseResult | None) -> dict[str, Any]:
    if result is None:
        return {"run": run, "result": None}
    label = status_label(result.verdict, result.reason) if result.verdict else ""
    return {"run": run, "result": result, "verdict": label}

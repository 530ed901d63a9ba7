"""The HTML pages. Addresses under /part return fragments that a script replaces in place; full pages work without scripts."""

from __future__ import annotations

import shlex
from importlib import resources
from typing import Any
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse

from hushgrad.errors import HushgradError
from hushgrad.guarantee import questions
from hushgrad.report.charts import Chart, above, number, smoothed, upper
from hushgrad.serve import fields
from hushgrad.serve.access_control import CARD_POLICY
from hushgrad.serve.rules import in_words
from hushgrad.serve.runs import SHOWN, Run
from hushgrad.serve.services import services, while_wanted
from hushgrad.serve.views import NotThere, page, status_of

router = APIRouter(include_in_schema=False)
_STATIC = {"site.css": "text/css", "site.js": "text/javascript", "icon.svg": "image/svg+xml"}
_FIGURES = {"noise": "noise multiplier", "batch": "batch size", "steps": "steps taken"}


@router.get("/static/{name}")
def static(name: str) -> Response:
    """One of our three files."""
    if name not in _STATIC:
        raise NotThere("There is no such file.")
    content = resources.files("hushgrad.serve").joinpath("static").joinpath(name).read_bytes()
    return Response(content, media_type=_STATIC[name], headers={"cache-control": "no-cache"})


@router.get("/favicon.ico")
def icon() -> Response:
    """For pages that name none."""
    return static("icon.svg")


# The planner -----------------------------------------------------------------------------------------------------------


@router.get("/", response_class=HTMLResponse)
async def planner(request: Request) -> Response:
    """The form; with a question in the address, its answer too."""
    pairs, show = fields.split(request.query_params.multi_items())
    context: dict[str, Any] = {"numbers": fields.NUMBERS, "choices": fields.CHOICES, "given": dict(pairs), "problem": ""}
    status = 200
    try:
        context["question"] = question = fields.asked(pairs)
        if pairs:
            context |= await while_wanted(request, _answer(request, question, show))
    except HushgradError as error:
        context |= {"problem": str(error), "question": fields.asked([])}
        status = status_of(error)
    return page(request, "planner.html", status=status, **{"ranked": None, "figures": None, **context})


async def _answer(request: Request, question: dict[str, Any], show: str) -> dict[str, Any]:
    return {**await _ranking(request, question, show), **await _figures(request, question, show)}


@router.get("/part/plan", response_class=HTMLResponse)
async def plan_part(request: Request) -> Response:
    """The ranking."""
    pairs, show = fields.split(request.query_params.multi_items())
    return page(request, "_ranking.html", **await while_wanted(request, _ranking(request, fields.asked(pairs), show)))


@router.get("/part/curves", response_class=HTMLResponse)
async def curves_part(request: Request) -> Response:
    """The curves of one plan."""
    pairs, show = fields.split(request.query_params.multi_items())
    return page(request, "_curves.html", **await while_wanted(request, _figures(request, fields.asked(pairs), show)))


async def _ranking(request: Request, question: dict[str, Any], show: str) -> dict[str, Any]:
    found = await services(request).plan(question)
    ranked = found["candidates"]
    names = [one["name"] for one in ranked]
    worst = max(one["relative"] for one in ranked)
    return {
        "ranked": ranked,
        "dropped": found["dropped"],
        "chosen": show if show in names else names[0],
        "worst": worst,
        "query": urlencode(question),
        "command": _command(question),
        "refusal": services(request).rules.refusal(question),
        "questions": questions(question["epsilon"], question["delta"], records=question["dataset_size"]),
    }


def _command(question: dict[str, Any]) -> str:
    """The command line for the same question, and for the training that follows."""
    words = ["hushgrad", "plan"]
    for name, value in question.items():
        if name == "sampling":
            words += ["--no-sampling"] if value == "fixed" else []
        elif name != "relation" or value != "add_remove":
            words += [f"--{name.replace('_', '-')}", f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join([*words, "--save", "plan.json"]) + "\nhushgrad train recipe.toml --plan plan.json --out runs/mine"


async def _figures(request: Request, question: dict[str, Any], show: str) -> dict[str, Any]:
    chosen, found = await services(request).curves(question, show)
    sigma, budget = chosen["noise_multiplier"], question["epsilon"]
    marks = {"noise": sigma, "batch": question["batch_size"], "steps": chosen["steps"]}
    charts = []
    for name, label in _FIGURES.items():
        points = [(x, y) for x, y in found[name] if isinstance(y, (int, float)) and y > 0]
        if len(points) > 1:
            words = f"Epsilon of {chosen['name']} over the {label}, from {upper(points[0][1])} to {upper(points[-1][1])}."
            log = name != "steps"
            charts.append(
                Chart(
                    title=f"epsilon over {label}",
                    words=words,
                    x=label,
                    y="epsilon",
                    points=points,
                    mark=(marks[name], budget),
                    limit=budget,
                    log_x=log,
                    log_y=name == "noise",
                )
            )
    return {"figures": charts, "shown": chosen, "one_more_epoch": found["one_more_epoch"]}


# Runs ------------------------------------------------------------------------------------------------------------------


@router.get("/runs", response_class=HTMLResponse)
def runs(request: Request) -> Response:
    """All runs, newest first."""
    return page(request, "runs.html", **_listed(request))


@router.get("/part/runs", response_class=HTMLResponse)
def runs_part(request: Request) -> Response:
    """The table of runs."""
    return page(request, "_runs.html", **_listed(request))


def _listed(request: Request) -> dict[str, Any]:
    found, more = services(request).shelf.all()
    return {"runs": found, "more": more}


@router.get("/runs/{name:path}", response_class=HTMLResponse)
def run(request: Request, name: str) -> Response:
    """One run; a script keeps the page up to date."""
    found, _ = services(request).run(name)
    return page(request, "run.html", run=found, figures=_curves_of(found))


@router.get("/part/runs/{name:path}", response_class=HTMLResponse)
def run_part(request: Request, name: str) -> Response:
    """The numbers and curves of one run; 304 if nothing has changed."""
    found, _ = services(request).run(name)
    tag = f'"{found.version}.{found.state}"'
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"etag": tag})
    return page(request, "_run.html", headers={"etag": tag}, run=found, figures=_curves_of(found))


def _curves_of(run: Run) -> list[Chart]:
    """Curves with at least two points, those of the guarantee first."""
    return [
        Chart(
            title=SHOWN[name] + (" (not private)" if name.startswith("raw_") else ""),
            words=f"{SHOWN[name]} over the steps, from {number(points[0][1])} to {number(points[-1][1])}.",
            x="step",
            y=SHOWN[name],
            points=above(points) if name == "epsilon" else points if name == "learning_rate" else smoothed(points),
            limit=run.budget if name == "epsilon" else None,
            until=run.series.steps,
        )
        for name, points in run.series.curves.items()
        if len(points) > 1 and not (name == "learning_rate" and len({value for _, value in points}) == 1)
    ]


# Cards and the ledger --------------------------------------------------------------------------------------------------


@router.get("/cards", response_class=HTMLResponse)
def cards(request: Request) -> Response:
    """The finished runs."""
    return page(request, "cards.html", runs=_finished(request))


def _finished(request: Request) -> list[Run]:
    return [run for run in services(request).shelf.all()[0] if run.state == "finished"]


@router.get("/cards/{name:path}", response_class=HTMLResponse)
async def card(request: Request, name: str) -> Response:
    """The card itself, under a bar that leads back."""
    found = await while_wanted(request, services(request).card(name))
    bar = bytes(page(request, "_cardbar.html", name=name).body).decode()
    text = found["html"].replace("<body>", "<body>\n" + bar, 1)
    return HTMLResponse(text, headers={"content-security-policy": CARD_POLICY})


@router.get("/compare", response_class=HTMLResponse)
async def compare(request: Request, a: str = "", b: str = "") -> Response:
    """Two finished runs side by side; without two names, the form alone."""
    finished = [run.name for run in _finished(request)]
    found = await while_wanted(request, services(request).compare(a, b)) if a and b else None
    return page(request, "compare.html", names=finished, a=a, b=b, found=found)


@router.get("/download/{form}/{name:path}")
async def download(request: Request, form: str, name: str) -> Response:
    """The card as a file: the page as it is, or Markdown."""
    forms = {"html": ("html", "text/html; charset=utf-8"), "md": ("markdown", "text/markdown; charset=utf-8")}
    if form not in forms:
        raise NotThere("A card can be had as html or md.")
    found = await while_wanted(request, services(request).card(name))
    key, kind = forms[form]
    file = quote(f"privacy-card-{name.rsplit('/', 1)[-1]}.{form}", safe="")
    headers = {"content-disposition": f"attachment; filename*=UTF-8''{file}", "content-security-policy": CARD_POLICY}
    return PlainTextResponse(found[key], headers=headers, media_type=kind)


@router.get("/ledger", response_class=HTMLResponse)
async def ledger(request: Request) -> Response:
    """The budgets, and who spent them."""
    if services(request).settings.ledger is None:
        return page(request, "ledger.html", ledger=None)
    found = await while_wanted(request, services(request).ledger())
    policy = services(request).rules.policy()
    return page(request, "ledger.html", ledger=found, approvals=0 if policy is None else policy.approvals)


@router.get("/policy", response_class=HTMLResponse)
def policy(request: Request) -> Response:
    """What is allowed, and what it says of the finished runs."""
    rules = services(request).rules.policy()
    if rules is None:
        return page(request, "policy.html", rules=None)
    return page(request, "policy.html", rules=in_words(rules), digest=rules.digest, runs=_finished(request))

"""The same answers as JSON, for programs. Read-only; described at /api/openapi.json."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from hushgrad import __version__
from hushgrad.serve import fields
from hushgrad.serve.services import services, while_wanted

_PROBLEM = {
    "description": "A problem (RFC 9457): `detail` is one sentence.",
    "content": {
        "application/problem+json": {
            "schema": {
                "type": "object",
                "properties": {"title": {"type": "string"}, "status": {"type": "integer"}, "detail": {"type": "string"}},
            }
        }
    },
}
router = APIRouter(prefix="/api", responses={404: _PROBLEM, 422: _PROBLEM, 503: _PROBLEM, 504: _PROBLEM})
_SHOW = {
    "name": "show",
    "in": "query",
    "description": "Name of a ranked plan; the best one if left out.",
    "schema": {"type": "string"},
}


@router.get("/health", tags=["server"])
def health() -> dict[str, Any]:
    """Whether the server answers, and its version."""
    return {"ok": True, "version": __version__}


@router.get("/plan", tags=["planner"], openapi_extra={"parameters": fields.parameters()})
async def plan(request: Request) -> dict[str, Any]:
    """Calibrated plans for a budget, best first, each with predicted error, noise state and a reason."""
    question = fields.asked(request.query_params.multi_items())
    return {"question": question, **await while_wanted(request, services(request).plan(question))}


@router.get("/curves", tags=["planner"], openapi_extra={"parameters": [*fields.parameters(), _SHOW]})
async def curves(request: Request) -> dict[str, Any]:
    """Epsilon of one plan against its noise, batch size and steps, as [x, epsilon] pairs; what one more epoch costs."""
    pairs, show = fields.split(request.query_params.multi_items())
    question = fields.asked(pairs)
    chosen, found = await while_wanted(request, services(request).curves(question, show))
    return {"question": question, "plan": chosen["name"], "noise_multiplier": chosen["noise_multiplier"], **found}


@router.get("/runs", tags=["runs"])
def runs(request: Request) -> dict[str, Any]:
    """The runs below the folder that is served, newest first, each with its state, step and newest metrics."""
    found, more = services(request).shelf.all()
    return {"runs": [run.to_json(curves=False) for run in found], "more": more}


@router.get("/runs/{name:path}", tags=["runs"])
def run(request: Request, name: str) -> dict[str, Any]:
    """One run, with its curves so far as [step, value] pairs."""
    return services(request).run(name)[0].to_json()


@router.get("/cards/{name:path}", tags=["cards"])
async def card(request: Request, name: str) -> dict[str, Any]:
    """The privacy card of a finished run."""
    found: dict[str, Any] = (await while_wanted(request, services(request).card(name)))["json"]
    return found


@router.get("/policy", tags=["policy"])
def policy(request: Request) -> dict[str, Any]:
    """What is allowed: the rules of the policy and its SHA-256, which cards name; null for both where there is no policy."""
    found = services(request).rules.policy()
    return {"policy": None, "sha256": None} if found is None else {"policy": found.to_json(), "sha256": found.digest}


@router.get("/ledger", tags=["ledger"])
async def ledger(request: Request) -> dict[str, Any]:
    """Data sets with their budgets, what is spent and reserved, the newest runs, and whether the hash chain is whole."""
    return await while_wanted(request, services(request).ledger())

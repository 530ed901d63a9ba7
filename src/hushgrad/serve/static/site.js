// The page works without this script; with it, answers are exchanged in place. No state is changed anywhere.
"use strict";

const byId = (id) => document.getElementById(id);

// Exchange the content of `place`, and keep what the reader had open or focused.
function exchange(place, html) {
  const open = [...place.querySelectorAll("details[open]")].map((d) => d.id);
  const focused = place.contains(document.activeElement) ? handle(document.activeElement) : null;
  const content = new DOMParser().parseFromString(html, "text/html").body;
  place.replaceChildren(...content.childNodes);
  for (const details of place.querySelectorAll("details")) if (open.includes(details.id)) details.open = true;
  if (focused) place.querySelector(focused)?.focus({ preventScroll: true });
}

function handle(element) {
  if (element.dataset.show) return `[data-show="${CSS.escape(element.dataset.show)}"]`;
  if (element.tagName === "SUMMARY") return `#${CSS.escape(element.parentElement.id)} > summary`;
  if (element.tagName === "A") return `a[href="${CSS.escape(element.getAttribute("href"))}"]`;
  return element.id ? `#${CSS.escape(element.id)}` : null;
}

// The planner: sliders, and answers while they move ---------------------------------------------------------------

function planner(form) {
  const status = byId("status"), ranking = byId("ranking"), curves = byId("curves");
  let running = new AbortController(), timer = 0, show = new URLSearchParams(location.search).get("show") || "";

  for (const slide of form.querySelectorAll(".slide")) {
    const box = byId(slide.dataset.for), low = Math.log(box.dataset.low), high = Math.log(box.dataset.high);
    const follow = () => {
      const value = Number(box.value);
      if (value > 0) slide.value = (400 * (Math.log(value) - low)) / (high - low);
      slide.setAttribute("aria-valuetext", box.value);
    };
    slide.addEventListener("input", () => {
      const value = Math.exp(low + ((high - low) * slide.value) / 400);
      box.value = round(value, "whole" in box.dataset);
      slide.setAttribute("aria-valuetext", box.value);
    });
    box.addEventListener("input", follow);
    follow();
    slide.hidden = false;
  }
  form.querySelector("button").hidden = true;

  async function part(address, place, signal) {
    place.setAttribute("aria-busy", "true");
    try {
      const reply = await fetch(address, { signal });
      exchange(place, await reply.text());
      return reply.ok;
    } finally {
      if (!signal.aborted) place.removeAttribute("aria-busy");
    }
  }

  async function load() {
    running.abort();
    running = new AbortController();
    const { signal } = running;
    const query = new URLSearchParams(new FormData(form));
    if (show) query.set("show", show);
    history.replaceState(null, "", `/?${query}`);
    const slow = setTimeout(() => { if (!signal.aborted) status.textContent = "Comparing …"; }, 400);
    try {
      const fine = await part(`/part/plan?${query}`, ranking, signal);
      status.textContent = "";
      if (fine) await part(`/part/curves?${query}`, curves, signal);
      else curves.replaceChildren();
    } catch (error) {
      if (!signal.aborted) status.textContent = "The server does not answer. Is hushgrad serve still running?";
    } finally {
      clearTimeout(slow);
    }
  }

  const soon = () => { clearTimeout(timer); timer = setTimeout(load, 250); };
  form.addEventListener("input", soon);
  form.addEventListener("submit", (event) => { event.preventDefault(); clearTimeout(timer); load(); });
  ranking.addEventListener("click", (event) => {
    const link = event.target.closest("[data-show]");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    show = link.dataset.show;
    load();
  });
  if (ranking.dataset.wait) load();
}

// Two or three digits, as people write them.
function round(value, whole) {
  const digits = Math.floor(Math.log10(value));
  if (digits < -3) return `${Math.round(value / 10 ** digits)}e${digits}`;
  const unit = 10 ** Math.max(digits - 1, whole ? 0 : -12);
  return String(Number((Math.round(value / unit) * unit).toPrecision(6)));
}

// Runs: ask again while there is more to come -----------------------------------------------------------------------

function live(place) {
  const status = byId("status");
  let tag = "", said = 0, misses = 0;

  async function again() {
    let more = true;
    if (!document.hidden) {
      try {
        const reply = await fetch(place.dataset.part, { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
        if (reply.ok) {
          tag = reply.headers.get("ETag") || "";
          exchange(place, await reply.text());
          const facts = place.querySelector("[data-say]");
          more = !facts || "more" in facts.dataset;
          if (facts && status && (!more || Date.now() - said > 15000)) { status.textContent = facts.dataset.say; said = Date.now(); }
        }
        misses = 0;
      } catch (error) {
        misses += 1; // the server has gone; ask less and less often
      }
    }
    if (more) setTimeout(again, Number(place.dataset.every) * Math.min(30, 1 + misses * misses));
  }
  setTimeout(again, Number(place.dataset.every));
}

if (byId("planner")) planner(byId("planner"));
if (byId("live")) live(byId("live"));

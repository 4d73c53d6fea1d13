"use strict";

// Plotly's own responsiveness follows the window only; a chart's column also changes when a section is unfolded.
const observer = new ResizeObserver((entries) => entries.forEach((entry) => {
  if (entry.contentRect.width) Plotly.Plots.resize(entry.target);
}));
const charts = document.querySelectorAll(".js-plotly-plot");
charts.forEach((chart) => observer.observe(chart));

// A browser prints as soon as beforeprint has returned, and Plots.resize draws later. The paper's columns are as wide on
// the screen, so the charts can be drawn for them there.
function forPaper(printing) {
  document.documentElement.classList.toggle("printing", printing);
  charts.forEach((chart) => { if (chart.clientWidth) Plotly.relayout(chart, {autosize: true}); });
}
addEventListener("beforeprint", () => forPaper(true));
addEventListener("afterprint", () => forPaper(false));

// A link to a section unfolds it.
document.querySelectorAll("nav a").forEach((link) => link.addEventListener("click", () => {
  const section = document.querySelector(link.hash).closest("section");
  if (link.hash === "#diagnostics") section.querySelectorAll("details").forEach((details) => details.open = true);
}));

document.querySelectorAll("[data-copy]").forEach((button) => button.addEventListener("click", () => {
  const area = document.createElement("textarea");
  area.value = button.dataset.copy;
  document.body.append(area);
  area.select();
  button.textContent = document.execCommand("copy") ? "Copied" : "The browser did not copy";
  area.remove();
}));

// --- the samples ---------------------------------------------------------------------------------------------------

const PAGE = 25;

async function unpacked(element) {
  const bytes = Uint8Array.from(atob(element.textContent), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function make(tag, className, ...children) {  // text children stay text: nothing becomes markup
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

function shownResponse([greedy, reward, finished, answer, text, right]) {
  const verdict = (right ? "correct" : "incorrect") + (reward === 0 || reward === 1 ? "" : `, reward ${reward}`);
  const marks = [greedy ? "greedy" : "sampled", verdict, finished ? "" : "truncated",
    answer === null ? "no answer" : `answer ${answer}`];
  return make("div", `response ${right ? "right" : "wrong"}`,
    make("span", "mark", marks.filter(Boolean).join(", ")), make("pre", "", text));
}

function share(responses) {
  const sampled = responses.filter(([greedy]) => !greedy);
  return sampled.length ? sampled.filter((one) => one[5]).length / sampled.length : 0;
}

const solved = (responses) => responses.some((one) => one[0] && one[5]);
const FILTERS = {
  all: () => true,
  alone: () => true,
  wrong: (response) => !response[5],
  truncated: (response) => !response[2],
};

function browse({policies, problems}) {
  const form = document.getElementById("sample-filters"), list = document.getElementById("sample-list");
  const more = document.getElementById("sample-more");
  let found = [], shown = 0;

  const matching = (problem, place) => problem.responses[place].filter(FILTERS[form.filter.value]);
  const places = () => form.policy.value === "" ? policies.map((_, place) => place) : [Number(form.policy.value)];

  function matches(problem) {
    if (form.filter.value === "alone") {
      const solvers = policies.map((_, place) => place).filter(
        (place) => policies[place].trained && solved(problem.responses[place]));
      if (solvers.length !== 1 || !places().includes(solvers[0])) return false;
    }
    const text = form.search.value.trim().toLowerCase();
    const kept = places().flatMap((place) => matching(problem, place));
    if (!kept.length) return false;
    const all = [problem.id, problem.question, problem.answer, ...kept.map((response) => response[4])];
    return !text || all.some((one) => one.toLowerCase().includes(text));
  }

  function card(problem) {
    const rates = places().map((place) => `${policies[place].label} ${Math.round(100 * share(problem.responses[place]))} %`);
    const details = make("details", "problem", make("summary", "", make("code", "", problem.question),
      make("span", "quiet", ` ${problem.id}, answer ${problem.answer}; right: ${rates.join(", ")}`)));
    details.addEventListener("toggle", () => {
      if (!details.open || details.querySelector(".solutions")) return;
      details.append(make("div", "solutions", ...places().map((place) => make("article", "",
        make("h4", "", policies[place].label), ...matching(problem, place).map(shownResponse)))));
    });
    return details;
  }

  function showMore() {
    list.append(...found.slice(shown, shown + PAGE).map(card));
    shown += PAGE;
    more.hidden = shown >= found.length;
  }

  function refresh() {
    found = problems.filter(matches);
    if (form.order.value === "apart") {
      const apart = new Map(found.map((problem) => {
        const shares = problem.responses.map(share);
        return [problem, Math.max(...shares) - Math.min(...shares)];
      }));
      found.sort((one, other) => apart.get(other) - apart.get(one));
    }
    document.getElementById("sample-count").textContent = `${found.length} of ${problems.length} problems`;
    list.replaceChildren();
    shown = 0;
    showMore();
    if (list.firstChild) list.firstChild.open = true;
  }

  form.addEventListener("input", refresh);
  form.addEventListener("submit", (event) => event.preventDefault());
  more.addEventListener("click", showMore);
  refresh();
}

const packed = document.getElementById("sample-data");
if (packed) unpacked(packed).then(browse);

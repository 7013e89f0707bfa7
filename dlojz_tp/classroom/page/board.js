"use strict";
// The page of `python -m dlojz_tp class`: asks for the state again and again, and draws it. Text is only ever text.
const MARKS = { pass: ["★", "pass"], "not yet robust": ["✓", "edge"], "by catch_up": ["»", "given"], fail: ["✗", "fail"], "not done": ["…", "begun"], "could not judge": ["⚠", "broken"] };
const MARKED = "★ passed · ✓ works, not yet robust · » by catch_up · ✗3 failed, three times in a row · … begun · ⚠ could not judge";
const COLOURED = "done/all balises · green: all passed · amber: all done, some not yet robust · blue: all done, some by catch_up · red: the last verdict on a balise is a failure";
const EVERY = 2000, HIDDEN = 15000; // milliseconds
const $ = (id) => document.getElementById(id);
let state = null, heard = 0, tab = decodeURIComponent(location.hash.slice(1));

function node(tag, text = "", kind = "", children = []) {
  const made = document.createElement(tag);
  if (text !== "") made.textContent = text;
  if (kind) made.className = kind;
  made.append(...children);
  return made;
}

const short = (work) => work.slice(0, 2);
const words = (work) => work.slice(3).replaceAll("_", " ");
const number = (value) => (value === null ? "" : Number(value).toFixed(value < 10 && value % 1 ? 1 : 0));

function ago(minutes) {
  if (minutes < 1) return "now";
  if (minutes < 90) return `${Math.round(minutes)} min ago`;
  return minutes < 60 * 36 ? `${Math.round(minutes / 60)} h ago` : `${Math.round(minutes / 1440)} days ago`;
}

function titled(made, text) {
  made.title = text;
  return made;
}

function row(...cells) {
  return node("tr", "", "", cells);
}

function workOf(name) {
  return state.works.find((work) => work.name === name);
}

function drawStuck() {
  const stuck = state.trainees.filter((one) => one.stuck.length).sort((one, other) => other.minutes - one.minutes);
  const cards = stuck.map((one) => {
    const balise = workOf(one.work).balises.find((each) => each.number === one.at);
    const card = node("div", "", "card", [
      node("b", one.name), `${short(one.work)}, balise ${one.at} · ${balise.title}`,
      node("div", `${one.stuck.join(", ")}; last verdict ${ago(one.quiet)}`, "quiet"),
    ]);
    if (one.hint) card.append(node("div", "", "", [node("code", one.hint), one.words && ` ${one.words}`]));
    return card;
  });
  $("stuck").replaceChildren(...(cards.length ? cards : [node("p", "Nobody, for now.", "quiet")]));
}

function drawTabs() {
  const names = ["", ...state.works.map((work) => work.name)];
  if (!names.includes(tab)) tab = "";
  const buttons = names.map((name) => {
    const button = node("button", name ? `${short(name)} ${words(name)}` : "all works");
    button.setAttribute("aria-pressed", String(name === tab));
    button.dataset.work = name;
    button.onclick = () => { tab = name; history.replaceState(null, "", `#${name}`); draw(); };
    return button;
  });
  const focused = document.activeElement && document.activeElement.dataset.work;
  $("tabs").replaceChildren(...buttons);
  if (focused !== undefined) buttons.find((each) => each.dataset.work === focused)?.focus();
}

function nameCell(one) {
  const cell = node("th", one.name, one.stuck.length ? "stuck" : "");
  cell.scope = "row";
  cell.append(node("span", ` ${ago(one.quiet)}`, "quiet"));
  return cell;
}

function verdictCell(one, work, balise) {
  const [word, attempts, failed, minutes, hint] = (one.cells[work.name] || {})[balise.number] || ["", 0, 0, 0, ""];
  const [mark, kind] = MARKS[word] || ["", ""];
  const cell = node("td", mark + (failed > 1 ? failed : ""), kind);
  if (one.work === work.name && one.at === balise.number) cell.classList.add("here");
  const facts = [word || "not begun", `${attempts} attempts`, `${number(minutes)} minutes`, hint && `hint ${hint}`].filter(Boolean);
  return titled(cell, `${one.name}, balise ${balise.number} · ${balise.title}: ${facts.join(", ")}`);
}

function drawOne(work) {
  const head = row(node("th", ""), ...work.balises.map((each) => node("th", each.title, "", [])));
  head.querySelectorAll("th:not(:first-child)").forEach((cell, k) => cell.prepend(node("b", String(work.balises[k].number))));
  const rows = state.trainees.map((one) => row(nameCell(one), ...work.balises.map((each) => verdictCell(one, work, each))));
  const sum = work.balises.reduce((total, each) => total + (each.median || 0), 0);
  const foot = [
    ["passed", (each) => `${each.passed} of ${state.trainees.length}`],
    [`median minutes (${number(sum)} in all)`, (each) => number(each.median)],
    [`stated minutes (${work.stated === null ? "?" : number(work.stated)} in all)`, (each) => number(each.stated)],
  ].map(([title, value]) => row(node("th", title), ...work.balises.map((each) => node("td", value(each)))));
  $("board").replaceChildren(node("thead", "", "", [head]), node("tbody", "", "", rows), node("tfoot", "", "", foot));
}

function drawAll() {
  // numbers alone, so that all works fit the width of a laptop: the buttons above have their names
  const head = row(node("th", ""), ...state.works.map((work) => titled(node("th", "", "", [node("b", short(work.name))]), words(work.name))));
  const rows = state.trainees.map((one) => row(nameCell(one), ...state.works.map((work) => {
    const cells = Object.values(one.cells[work.name] || {});
    const robust = cells.filter((each) => each[0] === "pass").length;
    const edge = cells.filter((each) => each[0] === "not yet robust").length;
    const passed = robust + edge;
    const given = cells.filter((each) => each[0] === "by catch_up").length;
    const all = work.balises.length;
    const kind = passed === all ? (edge ? "edge" : "pass") : cells.some((each) => each[0] === "fail") ? "fail" : passed + given === all ? "given" : "";
    const cell = node("td", cells.length || one.work === work.name ? `${passed}/${all}` : "", kind);
    if (one.work === work.name && one.at !== null) cell.classList.add("here");
    return titled(cell, `${one.name}, ${work.title}: ${passed} passed, ${given} by catch_up, of ${all}`);
  })));
  const medians = (work) => number(work.balises.reduce((total, each) => total + (each.median || 0), 0));
  const foot = [
    ["median minutes", medians], ["stated minutes", (work) => number(work.stated)],
  ].map(([title, value]) => row(node("th", title), ...state.works.map((work) => node("td", value(work)))));
  $("board").replaceChildren(node("thead", "", "", [head]), node("tbody", "", "", rows), node("tfoot", "", "", foot));
}

function drawHints() {
  const head = row(...["where", "hint", "", "trainees", "times", "still there"].map((text, k) => node("th", text, k > 2 ? "number" : "")));
  const rows = state.hints.map((each) => row(
    node("td", `${short(each.work)}.${each.balise}`), node("td", "", "", [node("code", each.hint)]), node("td", each.text),
    ...[each.trainees, each.times, each.now].map((value) => node("td", String(value), "number")),
  ));
  $("hints").replaceChildren(node("thead", "", "", [head]), node("tbody", "", "", rows));
}

function drawRaces() {
  $("races").hidden = !state.races.length;
  const head = row(...["balise", "place", "trainee", "time / PyTorch's", "±"].map((text, k) => node("th", text, k === 0 || k === 2 ? "" : "number")));
  const rows = state.races.flatMap((race) => race.lines.map((line, k) => row(
    node("td", k ? "" : `${short(race.work)}.${race.balise} · ${race.title}`), node("td", String(line.place), "number"), node("td", line.name),
    node("td", line.ratio.toFixed(2), "number"), node("td", `${Math.round(100 * line.noise)} %`, "number"),
  )));
  $("raced").replaceChildren(node("thead", "", "", [head]), node("tbody", "", "", rows));
}

function drawSummary() {
  const late = Math.round((Date.now() - heard) / 1000);
  const busy = state.trainees.filter((one) => one.quiet < 60).length;
  $("summary").textContent = `${state.trainees.length} trainee${state.trainees.length === 1 ? "" : "s"}, ${busy} at work in the last hour; folder ${state.folder}`;
  const warnings = [...state.warnings];
  if (late > 10) warnings.unshift(`The board itself has not answered for ${late} s: is it still running?`);
  $("warning").textContent = warnings.join(" ");
  $("warning").hidden = !warnings.length;
}

function draw() {
  drawSummary();
  drawStuck();
  drawTabs();
  const work = workOf(tab);
  $("board").className = work ? "" : "all";
  if (work) drawOne(work);
  else drawAll();
  $("legend").textContent = (work ? MARKED : COLOURED) + " · framed: here now";
  drawRaces();
  drawHints();
}

async function ask() {
  try {
    const answer = await fetch("state.json", { cache: "no-store", signal: AbortSignal.timeout(10000) });
    if (!answer.ok) throw new Error(answer.statusText);
    state = await answer.json();
    heard = Date.now();
    draw();
  } catch {
    if (state) drawSummary();
    else $("summary").textContent = "The board does not answer.";
  }
  setTimeout(ask, document.hidden ? HIDDEN : EVERY);
}

document.addEventListener("visibilitychange", () => { if (state) drawSummary(); });
ask();

// The search page. Every text from the server goes into the page as text (`append` of strings), never as markup.
const at = id => document.getElementById(id);
const plural = (n, one) => `${n.toLocaleString("en")} ${one}${n === 1 ? "" : "s"}`;
const ordinal = n => n.toLocaleString("en") + (n % 100 - n % 10 === 10 ? "th" : ["th", "st", "nd", "rd"][n % 10] ?? "th");

function make(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

async function ask(path, body) {
  let answer;
  try {
    answer = await fetch(path, body && { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  } catch {
    throw new Error("The server is not responding. Is it still running?");
  }
  const said = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(said.error ?? `The server returned status ${answer.status}.`);
  return said;
}

// ---- state ----

let about = null, last = 0, shown = 0;

function tell(text) { // an error; the results on the page then belong to another question
  at("message").textContent = text;
  at("message").hidden = !text;
  document.body.classList.toggle("stale", Boolean(text));
}

function count() { // how much room the question has left, once it nears the limit
  const most = about?.limits.query_characters ?? Infinity, used = [...at("query").value].length;
  at("room").hidden = used < .8 * most;
  at("room").classList.toggle("over", used > most);
  at("room").textContent = `${used.toLocaleString("en")} of ${most.toLocaleString("en")} characters`;
  return used <= most;
}

// ---- results ----

function line(name, kind, { score, rank }, { median, best }) { // a bar runs from the median text to the best one: cosines between a language model's states are close together
  const filled = make("i");
  filled.style.setProperty("--score", best > median ? Math.max(0, (score - median) / (best - median)) : 0);
  return [make("span", { className: "by" }, name), make("span", { className: `bar ${kind}`, ariaHidden: "true" }, filled),
    make("span", { className: `value ${kind}` }, score.toFixed(3).replace("-", "\u2212")), make("span", { className: "place" }, ordinal(rank))];
}

function card(hit, own, range, other, otherRange) {
  const text = make("p", { className: "text" }, hit.text || "(empty text)");
  const scores = make("div", { className: "scores" }, ...line(own, "own", hit, range));
  if (other) scores.append(...line(other, "other", hit.elsewhere, otherRange));
  const name = make("p", { className: "id" }, hit.id);
  if (hit.judged) name.append(make("span", { className: "judged", title: "The evaluation set judges this text relevant to the question" }, "relevant"));
  const body = make("div", {}, name, text, make("button", { className: "more", type: "button", hidden: true, ariaExpanded: "false" }, "full text"), scores);
  const item = make("li", { className: "hit", tabIndex: -1 }, make("span", { className: "rank" }, String(hit.rank)), body);
  item.dataset.id = hit.id;
  return item;
}

function column(model, found, other, otherFound) {
  const head = [make("h2", {}, model.name), make("p", { className: "kind quiet" }, [model.about, `${Math.max(1, Math.round(1000 * found.seconds))} ms`].join(" · "))];
  if (model.writes) head.push(make("figure", { className: "memory waiting" },
    make("figcaption", { className: "quiet" }, "What the model writes from your question's embedding alone"), make("blockquote")));
  return make("section", { className: "column", ariaLabel: model.name }, ...head, make("ol", {}, ...found.hits.map(hit => card(hit, model.name, found.range, other, otherFound?.range))));
}

function draw(found) {
  const names = about.models.map(model => model.name), two = names.length === 2;
  at("results").classList.toggle("two", two);
  at("results").replaceChildren(...found.models.map((one, n) => column(about.models[n], one, two ? names[1 - n] : "", found.models[1 - n])));
  at("results").querySelector(".hit")?.setAttribute("tabindex", 0);
  const [left, right] = found.models.map(one => new Set(one.hits.map(hit => hit.id)));
  const same = two ? `, ${[...left].filter(id => right.has(id)).length} of the top ${left.size} in common` : "";
  at("status").textContent = `${plural(about.documents, "text")} ranked in ${Math.max(1, Math.round(1000 * found.seconds))} ms${same}`;
  at("key").hidden = false;
  show(shown);
  settle();
}

function show(n) { // on a phone, one of the two columns
  shown = n;
  at("results").querySelectorAll(".column").forEach((one, m) => one.classList.toggle("shown", m === n));
  at("switch").querySelectorAll("button").forEach((one, m) => one.ariaPressed = String(m === n));
  offerWhole();
}

function offerWhole() { // only where a text is truncated
  for (const item of document.querySelectorAll(".hit:not(.whole)")) {
    const text = item.querySelector(".text");
    item.querySelector(".more").hidden = text.scrollHeight <= text.clientHeight + 1;
  }
}

function join() { // lines between the two cards of a text
  const results = at("results"), [left, right] = results.querySelectorAll(".column");
  results.querySelector("svg")?.remove();
  if (!right || !right.offsetParent || !left.offsetParent) return;
  const frame = results.getBoundingClientRect(), ns = "http://www.w3.org/2000/svg", svg = document.createElementNS(ns, "svg");
  svg.setAttribute("aria-hidden", "true");
  for (const from of left.querySelectorAll(".hit")) {
    const to = [...right.querySelectorAll(".hit")].find(item => item.dataset.id === from.dataset.id);
    if (!to) continue;
    const [a, b] = [from, to].map(item => item.getBoundingClientRect()), [x, y, u, v] = [a.right - frame.left, a.top - frame.top + 24, b.left - frame.left, b.top - frame.top + 24];
    const path = svg.appendChild(document.createElementNS(ns, "path"));
    path.setAttribute("d", `M${x} ${y}C${(x + u) / 2} ${y} ${(x + u) / 2} ${v} ${u} ${v}`);
    path.dataset.id = from.dataset.id;
  }
  results.append(svg);
}

function settle() { offerWhole(); join(); }

function light(id) { // the same text in both columns, and the line between them
  for (const one of document.querySelectorAll("[data-id]")) one.classList.toggle("same", one.dataset.id === id);
}

function unfold(item) {
  const more = item.querySelector(".more");
  if (more.hidden) return;
  const whole = item.classList.toggle("whole");
  more.ariaExpanded = String(whole);
  more.textContent = whole ? "less" : "full text";
  join();
}

// ---- asking ----

async function remember(query, instruction, turn) { // one after another: the server computes one at a time anyway
  for (const [n, model] of about.models.entries()) {
    if (!model.writes) continue;
    const figure = at("results").querySelectorAll(".column")[n].querySelector(".memory");
    let text;
    try { text = (await ask("api/decode", { query, instruction, model: n })).text || "(nothing)"; }
    catch (error) { text = error.message; }
    if (turn !== last) return;
    figure.classList.remove("waiting");
    figure.querySelector("blockquote").textContent = text;
    join();
  }
}

async function search(query) {
  const turn = ++last, instruction = at("instruction").value.trim();
  document.title = query ? `${query} · anchor_nb` : "Search · anchor_nb";
  document.body.classList.toggle("asked", Boolean(query));
  at("welcome").hidden = Boolean(query) || !about.examples.length;
  at("switch").hidden = !query || about.models.length < 2;
  if (!count()) return tell(`The question is too long. The limit is ${about.limits.query_characters.toLocaleString("en")} characters.`);
  tell("");
  if (!query) { at("results").replaceChildren(); at("status").textContent = ""; at("key").hidden = true; return; }
  document.body.classList.add("busy");
  try {
    const found = await ask("api/search", { query, instruction, k: Number(at("k").value) });
    if (turn !== last) return;
    draw(found);
    document.body.classList.remove("busy");
    await remember(query, instruction, turn);
  } catch (error) { if (turn === last) { tell(error.message); document.body.classList.remove("busy"); } }
}

const asked = () => new URLSearchParams(location.hash.slice(1)).get("q")?.trim() ?? ""; // after #, so the browser does not send it anywhere
function go(query) {
  const hash = query ? `#${new URLSearchParams({ q: query })}` : "";
  at("query").value = query;
  if (hash !== location.hash) history.pushState(null, "", hash || location.pathname);
  if (about) search(query); // otherwise the page searches as soon as it has loaded what there is
}

// ---- listening ----

at("ask").addEventListener("submit", event => { event.preventDefault(); go(at("query").value.trim()); });
at("query").addEventListener("input", count);
addEventListener("popstate", () => { at("query").value = asked(); if (about) search(asked()); });
at("examples").addEventListener("click", event => { if (event.target.matches("button")) { go(event.target.textContent); at("query").focus(); } });
at("switch").addEventListener("click", event => { const n = [...at("switch").children].indexOf(event.target); if (n >= 0) show(n); });
at("results").addEventListener("click", event => { if (event.target.matches(".more")) unfold(event.target.closest(".hit")); });
for (const [on, off] of [["mouseover", "mouseout"], ["focusin", "focusout"]]) {
  at("results").addEventListener(on, event => light(event.target.closest(".hit")?.dataset.id));
  at("results").addEventListener(off, () => light());
}
new ResizeObserver(() => { if (about) settle(); }).observe(at("results"));

function step(item, key) { // the card that an arrow key leads to
  const own = [...item.parentNode.children], place = own.indexOf(item), columns = [...at("results").querySelectorAll(".column")];
  if (key === "ArrowDown" || key === "ArrowUp") return own[place + (key === "ArrowDown" ? 1 : -1)];
  const there = columns[columns.indexOf(item.closest(".column")) + (key === "ArrowRight" ? 1 : -1)]?.querySelectorAll(".hit");
  return there && ([...there].find(one => one.dataset.id === item.dataset.id) ?? there[Math.min(place, there.length - 1)]);
}

addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
  const item = event.target.closest(".hit"), query = at("query"), typing = event.target.matches("input, select, textarea");
  if (event.key === "/" && !typing) { event.preventDefault(); query.focus(); query.select(); }
  else if (event.key === "Enter" && event.target === query && !event.shiftKey) { event.preventDefault(); at("ask").requestSubmit(); }
  else if (event.key === "Escape" && item) query.focus();
  else if (event.key === "ArrowDown" && event.target === query && query.selectionEnd === query.value.length) { event.preventDefault(); [...document.querySelectorAll(".hit")].find(one => one.offsetParent)?.focus(); }
  else if (event.key === "Enter" && item === event.target) unfold(item);
  else if (event.key.startsWith("Arrow") && item) {
    const next = step(item, event.key);
    event.preventDefault();
    if (next && !next.offsetParent) show([...at("results").querySelectorAll(".column")].indexOf(next.closest(".column")));
    if (next) next.focus(); else if (event.key === "ArrowUp") query.focus();
  }
});

// ---- start ----

try {
  about = await ask("api/about");
  at("about").textContent = `${about.corpus} · ${plural(about.documents, "text")}`;
  if (about.models.some(model => model.bm25)) at("key").textContent = "Numbers are cosine similarities, or scores together with BM25; bars run from the median text to the best one.";
  at("instruction").value = about.instruction;
  at("instruction").parentNode.hidden = !about.models.some(model => model.takes_instruction);
  at("k").append(...[...new Set([about.k, 5, 10, 20, 50, 100])].sort((a, b) => a - b).filter(n => n <= about.limits.hits).map(n => new Option(n, n, n === about.k, n === about.k)));
  at("examples").append(...about.examples.map(text => make("li", {}, make("button", { type: "button" }, text))));
  at("switch").append(...about.models.map(model => make("button", { type: "button" }, model.name)));
  at("query").value = asked() || at("query").value; // keep what was typed in the meantime
  await search(asked());
} catch (error) { tell(error.message); }

// The chat page: one conversation, streamed. What a model says is only ever shown as text.
"use strict";

const $ = (id) => document.getElementById(id);
const KEPT = ["system", "temperature", "top_p", "max_tokens", "seed"];

let messages = load("messages", []);
let running = null; // the AbortController of the answer that is being written

// -------------------------------------------------------------------------------------------
// What is kept in the browser.

function load(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function store(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
  } catch {
    // Private windows may keep nothing: the conversation lives until the page is closed.
  }
}

// -------------------------------------------------------------------------------------------
// Showing.

function element(kind, name, text = "") {
  const made = document.createElement(kind);
  made.className = name;
  made.textContent = text;
  return made;
}

// Text with ``` blocks of code between; the blocks' languages are left out.
function showText(bubble, text) {
  bubble.replaceChildren();
  text.split(/^```.*\n?/m).forEach((part, i) => {
    if (part) bubble.append(i % 2 ? element("pre", "", part.replace(/\n$/, "")) : part.trim());
  });
}

function addTurn(message) {
  const turn = element("article", `turn ${message.role}`);
  const bubble = element("div", "bubble");
  const facts = element("div", "facts", message.facts ?? "");
  turn.append(bubble, facts);
  if (message.role === "user") bubble.textContent = message.content;
  else showText(bubble, message.content);
  if (message.error) facts.classList.add("error");
  $("empty").hidden = true;
  $("log").append(turn);
  return { turn, bubble, facts };
}

function showAll() {
  for (const turn of $("log").querySelectorAll(".turn")) turn.remove();
  $("empty").hidden = messages.length > 0;
  messages.forEach(addTurn);
  scrollDown();
}

function scrollDown() {
  $("log").scrollTop = $("log").scrollHeight;
}

function isAtEnd() {
  const log = $("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 60;
}

function fitInput() {
  const input = $("input");
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}

function showRunning() {
  $("send").textContent = running ? "Stop" : "Send";
  $("send").classList.toggle("stop", running !== null);
}

// -------------------------------------------------------------------------------------------
// Asking.

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

// Questions with their answers, and the last question. One that was never answered is left out
// with its error: many models' templates refuse two questions in a row.
function whatWasSaid() {
  const isAnswer = (m) => m?.role === "assistant" && m.content && !m.error;
  const isLast = (i) => i === messages.length - 1;
  return messages.filter((m, i) =>
    m.role === "user" ? isLast(i) || isAnswer(messages[i + 1]) : isAnswer(m),
  );
}

function makeBody() {
  const system = $("system").value.trim();
  const said = whatWasSaid();
  const body = {
    messages: [
      ...(system ? [{ role: "system", content: system }] : []),
      ...said.map(({ role, content }) => ({ role, content })),
    ],
    stream: true,
    stream_options: { include_usage: true },
  };
  if ($("models").value) body.model = $("models").value;
  for (const name of KEPT.slice(1)) if ($(name).value !== "") body[name] = Number($(name).value);
  return body;
}

// The JSON of each event of a response.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      yield JSON.parse(part.slice("data: ".length));
    }
  }
}

async function ask(signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: headers(),
    body: JSON.stringify(makeBody()),
    signal,
  });
  if (response.ok) return response;
  const text = await response.text();
  let reason = text.slice(0, 300);
  try {
    reason = JSON.parse(text).error.message;
  } catch {
    // Not ours: a proxy's page.
  }
  throw new Error(reason || `The server answers ${response.status}.`);
}

async function answer() {
  const conversation = messages;
  const message = { role: "assistant", content: "" };
  const shown = addTurn(message);
  shown.turn.classList.add("live");
  scrollDown();
  running = new AbortController();
  showRunning();
  const times = { start: performance.now(), first: null };
  let tokens = 0;
  try {
    for await (const event of events(await ask(running.signal))) {
      if (event.error) throw new Error(event.error.message);
      tokens = event.usage?.completion_tokens ?? tokens;
      const text = event.choices[0]?.delta.content;
      if (!text) continue;
      times.first ??= performance.now();
      if (!event.usage) tokens += 1;
      const follow = isAtEnd();
      message.content += text;
      showText(shown.bubble, message.content);
      shown.facts.textContent = describe(tokens, times);
      if (follow) scrollDown();
    }
    message.facts = describe(tokens, times);
  } catch (error) {
    const stopped = error.name === "AbortError";
    message.facts = stopped ? `${describe(tokens, times)} · stopped` : error.message;
    message.error = !stopped && !message.content;
    if (!stopped) shown.facts.classList.add("error");
  }
  shown.turn.classList.remove("live");
  shown.facts.textContent = message.facts;
  running = null;
  showRunning();
  if (messages !== conversation) return; // a new one was begun meanwhile
  messages.push(message);
  store("messages", messages);
  $("input").focus();
}

function describe(tokens, times) {
  if (times.first === null) return "nothing was said";
  const seconds = (performance.now() - times.first) / 1000;
  const rate = tokens > 1 && seconds > 0 ? `${((tokens - 1) / seconds).toFixed(1)} tokens/s · ` : "";
  const first = `first after ${((times.first - times.start) / 1000).toFixed(2)} s`;
  return `${tokens} tokens · ${rate}${first}`;
}

// -------------------------------------------------------------------------------------------
// Doing.

function send() {
  const content = $("input").value.trim();
  if (running || !content) return;
  messages.push({ role: "user", content });
  store("messages", messages);
  addTurn(messages.at(-1));
  $("input").value = "";
  fitInput();
  answer();
}

function startAnew() {
  running?.abort();
  messages = [];
  store("messages", messages);
  showAll();
  $("input").focus();
}

function toggleSettings() {
  const settings = $("settings");
  settings.hidden = !settings.hidden;
  $("show-settings").setAttribute("aria-expanded", String(!settings.hidden));
  if (!settings.hidden) $("system").focus();
}

async function showModel() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    const body = await response.json();
    if (!response.ok) throw new Error(body.error.message);
    const models = $("models");
    const asked = models.value;
    models.replaceChildren(...body.data.map((model) => new Option(model.id, model.id)));
    if (body.data.some((model) => model.id === asked)) models.value = asked;
    models.hidden = body.data.length < 2;
    $("model").hidden = !models.hidden;
    const model = body.data[models.selectedIndex];
    $("model").textContent = document.title = model.id;
    $("status").textContent = model.max_model_len ? `${model.max_model_len.toLocaleString("en")} tokens` : "";
  } catch (error) {
    $("status").textContent = error.message;
  }
}

$("models").addEventListener("change", showModel);

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) running.abort();
  else send();
});

$("input").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (event.altKey && event.key.toLowerCase() === "n") {
    event.preventDefault();
    startAnew();
  }
});

$("input").addEventListener("input", fitInput);
$("new").addEventListener("click", startAnew);
$("show-settings").addEventListener("click", toggleSettings);
$("key").addEventListener("change", showModel);

const settings = load("settings", {});
for (const name of KEPT) {
  if (name in settings) $(name).value = settings[name];
  $(name).addEventListener("change", () => {
    store("settings", Object.fromEntries(KEPT.map((one) => [one, $(one).value])));
  });
}

showModel();
showAll();

// Puts the JSON on the clipboard, which browsers grant to https and this machine; shows values of tokens.
const button = document.querySelector("#copy");
const said = document.querySelector("#copied");

async function copy() {
  try {
    const answer = await fetch(document.querySelector("#json").href);
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    await navigator.clipboard.writeText(await answer.text());
    said.textContent = "Copied.";
  } catch (error) {
    said.textContent = `Not copied (${error.message}); open the JSON.`;
  }
}

button.hidden = !navigator.clipboard;
button.addEventListener("click", copy);

const list = document.querySelector(".tokens");
const tokens = [...(list?.children ?? [])];
tokens.forEach((one, place) => { one.tabIndex = place ? -1 : 0; });

function show({ target }) {
  const place = tokens.indexOf(target);
  if (place < 0) return;
  const number = Number(list.dataset.first) + place;
  document.querySelector("#value").textContent = `Token ${number} ${JSON.stringify(target.textContent)}: ${target.title}`;
}

function keep({ target }) {
  for (const one of tokens) one.tabIndex = one === target ? 0 : -1; // Tab comes back to it
}

function move(event) {
  const place = tokens.indexOf(event.target);
  const to = { ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: tokens.length - 1 }[event.key];
  if (!tokens[to]) return;
  event.preventDefault();
  tokens[to].focus();
}

list?.addEventListener("pointerover", show);
list?.addEventListener("focusin", show);
list?.addEventListener("focusin", keep);
list?.addEventListener("keydown", move);

// Puts the JSON of the trajectory on the clipboard, which browsers grant to https and this machine.
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

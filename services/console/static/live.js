// Keeps the parts of a page that are marked with data-live as the server shows them now.
const EVERY_MS = 3000;

async function refresh() {
  if (document.hidden) return;
  const answer = await fetch(location.href, { cache: "no-store", headers: { accept: "text/html" } });
  if (!answer.ok || answer.redirected) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const part of document.querySelectorAll("[data-live]")) {
    const now = page.querySelector(`[data-live="${part.dataset.live}"]`);
    // A part that has the focus stays as it is: its links must not go away below the keyboard.
    if (now && now.innerHTML !== part.innerHTML && !part.contains(document.activeElement)) {
      const chosen = new Set([...part.querySelectorAll(":checked")].map((box) => box.value));
      part.replaceChildren(...now.childNodes);
      for (const box of part.querySelectorAll("input")) box.checked = chosen.has(box.value);
    }
  }
}

async function watch() {
  try {
    await refresh();
  } catch {
    // The console has stopped, or is on its way: the next look finds it.
  }
  setTimeout(watch, EVERY_MS);
}
setTimeout(watch, EVERY_MS);

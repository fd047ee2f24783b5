// Fills tables in place: rows are kept by their key, and only text that differs is written, so that a selection and the
// place of a scroll bar stay where they are.

export function fill(table, rows) {
  const body = table.tBodies[0];
  const labels = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
  const old = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  rows.forEach(({ key, cells }, at) => {
    const row = old.get(key) ?? make(key, cells, labels);
    old.delete(key);
    if (body.rows[at] !== row) body.insertBefore(row, body.rows[at] ?? null);
    cells.forEach((cell, column) => write(row.cells[column], cell));
  });
  for (const row of old.values()) row.remove();
}

function make(key, cells, labels) {
  const row = document.createElement("tr");
  row.dataset.key = key;
  row.setAttribute("role", "row");
  cells.forEach((_, column) => {
    const cell = document.createElement(column ? "td" : "th");
    if (column) cell.setAttribute("role", "cell");
    else cell.setAttribute("scope", "row");
    cell.dataset.label = labels[column];
    row.append(cell);
  });
  return row;
}

// A cell is a text, or {text, kind, chip, share, title}.
function write(cell, value) {
  const { text, kind = "", chip = "", share = null, title = "" } = typeof value === "object" ? value : { text: value };
  const wanted = JSON.stringify([text, kind, chip, share, title]);
  if (cell.dataset.now === wanted) return;
  cell.dataset.now = wanted;
  cell.className = `${kind}${text === "" || text === "–" ? " empty" : ""}`.trim();
  cell.title = title;
  if (chip) {
    const mark = document.createElement("span");
    mark.className = `chip ${chip}`;
    mark.textContent = text;
    cell.replaceChildren(mark);
  } else if (share != null) {
    const whole = document.createElement("span");
    const track = document.createElement("i");
    const part = document.createElement("b");
    whole.className = "share";
    part.style.width = `${Math.round(share * 100)}%`;
    track.append(part);
    whole.append(track, text);
    cell.replaceChildren(whole);
  } else {
    cell.textContent = text;
  }
}

"""The style sheet and the script of :mod:`f8fx.explanation.html`'s page."""

STYLE = """
:root { color-scheme: light dark;
  --ground:#ffffff; --panel:#f6f7f9; --ink:#1b1f24; --soft:#5a6470; --line:#d9dee4; --yes:#00795c; --no:#8a929c;
  --loss:#b4530a; --c0:#0072b2; --c1:#e69f00; --c2:#009e73; --c3:#cc79a7; --c4:#56b4e9; --c5:#d55e00;
  --c6:#b3a800; --c7:#7b61c4; --rest:#a9b1ba;
  --tc0:#fff; --tc1:#111; --tc2:#fff; --tc3:#111; --tc4:#111; --tc5:#fff; --tc6:#111; --tc7:#fff; --trest:#111; }
@media (prefers-color-scheme: dark) { :root {
  --ground:#14171b; --panel:#1d2127; --ink:#e8eaed; --soft:#a3acb7; --line:#363d46; --yes:#2fc49b; --no:#78818c;
  --loss:#f0924a; --c0:#3d9bd9; --c1:#eeb33b; --c2:#27b98d; --c3:#d893b8; --c4:#7cc6ef; --c5:#e8782f;
  --c6:#cfc536; --c7:#9c86dd; --rest:#5c656f;
  --tc0:#111; --tc1:#111; --tc2:#111; --tc3:#111; --tc4:#111; --tc5:#111; --tc6:#111; --tc7:#111; --trest:#fff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; margin: 0; line-height: 1.25; } h2 { font-size: 18px; margin: 40px 0 4px; }
header p, .note { color: var(--soft); margin: 4px 0 14px; max-width: 110ch; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(215px, 1fr)); gap: 12px; margin-top: 22px; }
.card { background: var(--panel); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px; }
.card b { display: block; font-size: 28px; white-space: nowrap; line-height: 1.2; font-weight: 650; letter-spacing: -.01em; }
.card b small { font-size: 15px; color: var(--soft); font-weight: 500; }
.card span { color: var(--soft); font-size: 14px; }
.banner { border-left: 4px solid var(--loss); background: var(--panel); padding: 10px 14px; margin-top: 18px; }
.bars { display: grid; grid-template-columns: max-content 1fr; gap: 8px 14px; align-items: center; }
.bars .name { text-align: right; } .bars .name small { display: block; color: var(--soft); }
.stack { display: flex; height: 52px; gap: 1px; min-width: 0; }
.stack div { overflow: hidden; white-space: nowrap; text-overflow: ellipsis; font-size: 12px;
  padding: 4px 6px; line-height: 1.3; }
.stack div.thin { padding: 0; } .stack div:first-child { border-radius: 5px 0 0 5px; }
.stack div:last-child { border-radius: 0 5px 5px 0; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 5px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; } .l { text-align: left; } td.why { white-space: normal; min-width: 20ch; }
td.fqn { white-space: normal; overflow-wrap: anywhere; min-width: 16ch; }
th button { font: inherit; color: inherit; background: none; border: 0; padding: 0; cursor: pointer; }
th[aria-sort="ascending"] button::after { content: " \\25b2"; }
th[aria-sort="descending"] button::after { content: " \\25bc"; }
.legend { margin-top: 14px; } .legend td, .legend th { padding: 3px 10px; }
.legend td.fqn { white-space: nowrap; }
.swatch { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 8px; vertical-align: -1px; }
.scroll { overflow-x: auto; }
.yes { color: var(--yes); font-weight: 600; } .no { color: var(--soft); }
.speed { display: grid; grid-template-columns: fit-content(45%) 1fr; gap: 0 12px; align-items: center; }
.speed .what { text-align: right; font-size: 13px; padding: 2px 0; overflow-wrap: anywhere; line-height: 1.3; }
.speed .what small { color: var(--soft); }
.track { position: relative; height: 100%; min-height: 22px; margin-right: 56px; }
.track i { position: absolute; top: 0; bottom: 0; width: 1px; background: var(--line); }
.track i.one { background: var(--ink); width: 2px; margin-left: -1px; }
.track .bar { position: absolute; top: 50%; transform: translateY(-50%); background: var(--yes); border-radius: 2px; }
.track .bar.skip { background: none; border: 2px solid var(--no); }
.track .bar.lose { background: var(--loss); }
.track em { position: absolute; top: 50%; transform: translateY(-50%); font: 600 12px/1 system-ui, sans-serif;
  padding: 0 6px; white-space: nowrap; }
.track.axis { min-height: 20px; } .track.axis span { position: absolute; transform: translateX(-50%);
  font-size: 12px; color: var(--soft); }
.key { display: flex; gap: 18px; flex-wrap: wrap; color: var(--soft); font-size: 13px; margin: 0 0 10px; }
.key .swatch { margin-right: 6px; } .key .hollow { background: none !important; border: 2px solid var(--no); }
.tools { display: flex; gap: 12px; flex-wrap: wrap; align-items: center; margin: 10px 0; }
.tools input[type=search], .tools select { font: inherit; color: inherit; background: var(--panel);
  border: 1px solid var(--line); border-radius: 6px; padding: 5px 9px; }
.tools output { color: var(--soft); margin-left: auto; }
tbody[hidden] { display: none; } .track .bar:hover, .stack div:hover { filter: brightness(1.15); }
@media (max-width: 640px) { .stack div { font-size: 0; padding: 0; } .card b { font-size: 22px; }
  .card b small { font-size: 12px; } .track.axis span { font-size: 9px; } }
@media print { .tools { display: none; } }
"""

SCRIPT = """
(() => {
  const table = document.getElementById("matmuls");
  if (!table) return;
  const [groups, each] = table.tBodies;
  const text = document.getElementById("find"), which = document.getElementById("which");
  const expand = document.getElementById("expand"), count = document.getElementById("count");
  document.querySelector(".tools").hidden = false;
  const show = () => {
    groups.hidden = expand.checked; each.hidden = !expand.checked;
    const words = text.value.toLowerCase().split(/\\s+/).filter(Boolean);
    let shown = 0;
    for (const row of (expand.checked ? each : groups).rows) {
      const line = row.textContent.toLowerCase();
      const fits = words.every(word => line.includes(word)) && (!which.value || row.dataset.float8 === which.value);
      row.hidden = !fits;
      if (fits) shown += Number(row.dataset.count);
    }
    count.textContent = shown + (shown === 1 ? " matmul" : " matmuls");
  };
  for (const input of [text, which, expand]) input.addEventListener("input", show);
  table.tHead.querySelectorAll("button").forEach((button, column) => button.addEventListener("click", () => {
    const header = button.parentElement;
    const numeric = header.dataset.numeric !== undefined;
    const up = header.getAttribute("aria-sort") === (numeric ? "descending" : "none");
    table.tHead.querySelectorAll("th").forEach(other => other.setAttribute("aria-sort", "none"));
    header.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = row => row.cells[column].dataset.key ?? row.cells[column].textContent;
    const order = (a, b) => numeric ? key(a) - key(b) : key(a).localeCompare(key(b), undefined, {numeric: true});
    for (const body of [groups, each])
      body.append(...[...body.rows].sort((a, b) => up ? order(a, b) : order(b, a)));
  }));
  show();
})();
"""

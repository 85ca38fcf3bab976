// Open neuroglancer in a browser and say what it shows: JSON on stdin, JSON on stdout.
//
// in:  {browser, profile, page, state, positions, picture, size}: program, empty folder for its profile, address of the
//      bundle, state of the viewer, positions in the state's dimensions, file of the picture, [width, height]
// out: {space, values, panels, messages, failures, requests}: dimensions with their units; what each layer has at each
//      position, as text; rectangles of the cross sections; what the page says; what went wrong; counts of the answers
import { json } from "node:stream/consumers";
import { chromium } from "playwright-core";

const PATIENCE_MS = 60_000;
const FLAGS = [
  "--no-sandbox",
  "--use-gl=angle",
  "--use-angle=swiftshader",
  "--enable-unsafe-swiftshader",
  "--disable-quic",
  "--no-first-run",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
];
const MESSAGES = "#neuroglancer-status-container li, .neuroglancer-layer-data-source-messages li";

/** Whether everything is drawn; runs in the page. */
function isDrawn(layers) {
  const { viewer } = window;
  return viewer?.isReady() && viewer.layerManager.managedLayers.length === layers;
}

/** What can be asked of the viewer; runs in the page. */
function found([positions, selector]) {
  const { coordinateSpace, layerManager } = window.viewer;
  const valueAt = (layer, position) => {
    const found = layer.renderLayers.map((part) => part.getValueAt(Float32Array.from(position)));
    return String(found.find((value) => value != null) ?? "");
  };
  const layers = layerManager.managedLayers.map(({ layer }) => layer);
  const { names, scales, units } = coordinateSpace.value;
  return {
    space: names.map((name, axis) => [name, scales[axis], units[axis]]),
    values: positions.map((position) => layers.map((layer) => valueAt(layer, position))),
    panels: [...document.querySelectorAll(".neuroglancer-rendered-data-panel")].map((panel) => {
      const { left, top, width, height } = panel.getBoundingClientRect();
      return [left, top, width, height].map(Math.round);
    }),
    messages: [...document.querySelectorAll(selector)].map((line) => line.textContent),
  };
}

const asked = await json(process.stdin);
const [width, height] = asked.size;
const browser = await chromium.launchPersistentContext(asked.profile, {
  executablePath: asked.browser,
  args: FLAGS,
  viewport: { width, height },
});
try {
  const [page] = browser.pages();
  const failures = [];
  const requests = {};
  page.on("pageerror", (error) => failures.push(`${error}`));
  page.on("console", (line) => line.type() === "error" && failures.push(`${line.text()} ${line.location().url}`));
  page.on("response", (answer) => {
    const what = `${answer.request().method()} ${answer.status()}`;
    requests[what] = (requests[what] ?? 0) + 1;
    if (!answer.ok()) failures.push(`${what} ${answer.url()}`);
  });
  await page.goto(`${asked.page}#!${encodeURIComponent(JSON.stringify(asked.state))}`);
  try {
    await page.waitForFunction(isDrawn, asked.state.layers.length, { timeout: PATIENCE_MS });
  } catch (error) {
    failures.push(`not drawn: ${error}`);
  }
  const seen = await page.evaluate(found, [asked.positions, MESSAGES]);
  await page.screenshot({ path: asked.picture });
  process.stdout.write(JSON.stringify({ ...seen, failures, requests }));
} finally {
  await browser.close();
}

// Bundle neuroglancer, as far as it opens Zarr stores over HTTP, into a folder: node bundle.mjs FOLDER
import { writeFile } from "node:fs/promises";
import { join } from "node:path";
import { build } from "esbuild";

const lib = join(import.meta.dirname, "node_modules/neuroglancer/lib");
const folder = process.argv[2];

const blankIcons = {
  name: "blank icons",
  setup(bundler) {
    bundler.onResolve({ filter: /^ikonate\/icons\// }, () => ({ path: "icon", namespace: "icon" }));
    bundler.onLoad({ filter: /.*/, namespace: "icon" }, () => ({ contents: "<svg></svg>", loader: "text" }));
  },
};

await build({
  // The workers are started by these names, one by the other from the folder above: serve this one as the root.
  entryPoints: ["main", "chunk_worker", "async_computation"].map((name) => join(lib, `${name}.bundle.js`)),
  outdir: folder,
  bundle: true,
  format: "esm",
  minify: true,
  logLevel: "error",
  loader: { ".wasm": "file" },
  plugins: [blankIcons],
  conditions: [
    "neuroglancer/datasource:none_by_default",
    "neuroglancer/datasource/zarr:enabled",
    "neuroglancer/kvstore:none_by_default",
    "neuroglancer/kvstore/http:enabled",
  ],
});
await writeFile(
  join(folder, "index.html"),
  '<!doctype html><meta charset="utf-8"><title>neuroglancer</title><link rel="icon" href="data:,"><link rel="stylesheet" href="main.bundle.css">' +
    '<div id="neuroglancer-container"></div><script type="module" src="main.bundle.js"></script>',
);

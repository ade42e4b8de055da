// Perfetto's trace processor, compiled to WebAssembly for its web page, between stdin and stdout.
// node trace_processor.js FOLDER, where FOLDER has engine_bundle.js and trace_processor.wasm.
"use strict";
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const folder = process.argv[2];
const { stdin, stdout } = process;

// What a web worker has, and not what node has.
globalThis.self = globalThis;
globalThis.location = { href: "", protocol: "", host: "" };
globalThis.WorkerGlobalScope = function () {};
globalThis.process = undefined;
globalThis.XMLHttpRequest = class {
  open(_, url) {
    this.file = path.join(folder, path.basename(url));
  }
  send() {
    this.status = 200;
    this.response = new Uint8Array(fs.readFileSync(this.file)).buffer;
  }
};
console.log = console.info = console.warn = console.error;

vm.runInThisContext(fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8"));
const port = { postMessage: (reply) => stdout.write(Buffer.from(reply)) };
self.onmessage({ data: port });
stdin.on("data", (request) => port.onmessage({ data: new Uint8Array(request) }));

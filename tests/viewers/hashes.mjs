// Read arrays of entries with zarrita: JSON on stdin, JSON on stdout.
//
// in:  [{entry: folder of an entry, array: its name, path: where the array is in the entry}, …]
// out: [{dtype, shape, codes, values}, …]: SHA-256 of little-endian bytes in C order, of what is stored and of what
//      `attributes.zcache.arrays` says that it stands for; {lacks: type} where this JavaScript has no such numbers
import { createHash } from "node:crypto";
import { json } from "node:stream/consumers";
import FileSystemStore from "@zarrita/storage/fs";
import * as zarr from "zarrita";

const NUMBERS = {
  "|b1": Uint8Array,
  "|i1": Int8Array,
  "|u1": Uint8Array,
  "<i2": Int16Array,
  "<u2": Uint16Array,
  "<i4": Int32Array,
  "<u4": Uint32Array,
  "<i8": BigInt64Array,
  "<u8": BigUint64Array,
  "<f2": globalThis.Float16Array, // since Node.js 24
  "<f4": Float32Array,
  "<f8": Float64Array,
};
const BITS = { 1: Uint8Array, 2: Uint16Array, 4: Uint32Array, 8: BigUint64Array };

const bytesOf = (array) => new Uint8Array(array.buffer, array.byteOffset, array.byteLength);
const sha256 = (array) => createHash("sha256").update(bytesOf(array)).digest("hex");
const isBig = (array) => array instanceof BigInt64Array || array instanceof BigUint64Array;
// A NaN keeps its payload only as an integer.
const bitsOf = (array) => new BITS[array.BYTES_PER_ELEMENT](array.buffer, array.byteOffset, array.length);

function hexFloat(text) {
  const [, sign, whole, fraction = "", exponent] = /^(-?)0x([01])(?:\.([0-9a-f]+))?p([+-]\d+)$/.exec(text);
  const value = Number(BigInt(`0x${whole}${fraction}`)) * 2 ** (Number(exponent) - 4 * fraction.length);
  return sign ? -value : value;
}

function lookUp(codes, table) {
  const bits = bitsOf(table);
  const found = new table.constructor(codes.length);
  const out = bitsOf(found);
  for (let i = 0; i < codes.length; i++) out[i] = bits[codes[i]];
  return found;
}

function levels({ offset, scale, levels: n, specials }, Numbers) {
  const [low, step] = [offset, scale].map(hexFloat);
  const table = new Numbers(n + specials.length);
  for (let i = 0; i < n; i++) table[i] = low + step * i;
  const big = table.BYTES_PER_ELEMENT === 8;
  specials.forEach((bits, i) => (bitsOf(table)[n + i] = big ? BigInt(bits) : Number(bits)));
  return table;
}

function restore(codes, { narrowing, table }) {
  const Numbers = NUMBERS[narrowing.dtype];
  switch (narrowing.kind) {
    case "identity":
      return codes;
    case "cast": {
      const values = new Numbers(codes.length);
      const widen = isBig(values) && !isBig(codes) ? BigInt : (code) => code;
      for (let i = 0; i < codes.length; i++) values[i] = widen(codes[i]);
      return values;
    }
    case "table":
      return lookUp(codes, new Numbers(new Uint8Array(Buffer.from(table, "base64")).buffer));
    case "affine":
      return lookUp(codes, levels(narrowing, Numbers));
    default:
      throw new Error(`a narrowing of kind ${narrowing.kind}`);
  }
}

const groups = {};

async function read({ entry, array: name, path }) {
  groups[entry] ??= await zarr.open.v3(new FileSystemStore(entry), { kind: "group" });
  const described = groups[entry].attrs.zcache.arrays[name];
  const lacking = [described.narrowing.dtype, described.narrowing.code_dtype].find((dtype) => !NUMBERS[dtype]);
  if (lacking) return { lacks: lacking };
  const array = await zarr.open.v3(groups[entry].resolve(path), { kind: "array" });
  const { data, shape } = await zarr.get(array);
  const codes = array.dtype === "bool" ? new Uint8Array(data.buffer, data.byteOffset, data.length) : data;
  return { dtype: array.dtype, shape, codes: sha256(codes), values: sha256(restore(codes, described)) };
}

const results = [];
for (const wanted of await json(process.stdin)) results.push(await read(wanted));
process.stdout.write(JSON.stringify(results));

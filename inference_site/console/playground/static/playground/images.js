// The images of the next message: chosen, pasted or dropped, and sent unchanged.
import { button, complain, made } from "./dom.js";

export const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MOST = 8;

function read(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

export class Images {
  #list;
  #mostBytes;
  #changed;
  urls = [];

  constructor(list, mostBytes, changed) {
    this.#list = list;
    this.#mostBytes = mostBytes;
    this.#changed = changed;
  }

  set(urls) {
    this.urls = urls;
    this.#list.replaceChildren(...urls.map((url, place) => this.#shown(url, place)));
  }

  /** Add the files that are images within the limits; show a message about the others. */
  async add(files) {
    const urls = [...this.urls];
    let bytes = urls.reduce((sum, url) => sum + url.length * 0.75, 0);
    let fault = "";
    for (const file of [...files]) {
      const name = file.name || "The image";
      if (!TYPES.includes(file.type)) fault = `${name}: only PNG, JPEG, WebP and GIF images.`;
      else if (urls.length >= MOST) fault = `${name}: at most ${MOST} images in a message.`;
      else if (bytes + file.size > this.#mostBytes) {
        fault = `${name}: the images of a message may have ${Math.floor(this.#mostBytes / 2 ** 20)} MiB.`;
      } else {
        bytes += file.size;
        urls.push(await read(file));
      }
    }
    this.set(urls);
    this.#changed();
    complain(fault);
  }

  #shown(url, place) {
    const entry = made("li");
    const remove = () => {
      this.set(this.urls.filter((_, other) => other !== place));
      this.#changed();
    };
    entry.append(
      made("img", "", "", { src: url, alt: `Image ${place + 1}` }),
      button("×", remove, { "aria-label": `Remove image ${place + 1}` }),
    );
    return entry;
  }
}

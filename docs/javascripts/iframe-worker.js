// Search in pages that lie on a disk: browsers start no workers there, so the worker's script runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.documentElement.append(frame)
      const inside = frame.contentWindow
      // What the script posts arrives here; a window's own postMessage would post it back to itself.
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = frame.contentDocument.createElement("script")
      script.src = url
      this.inside = new Promise((loaded, failed) => {
        script.onload = () => loaded(inside)
        script.onerror = failed
      })
      frame.contentDocument.body.append(script)
    }
    postMessage(data) {
      this.inside.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data })))
    }
    terminate() {}
  }
}

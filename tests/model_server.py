"""llama.cpp's own server as a program: ``model_server.py PORT KEY FILE SLOTS CONTEXT``."""

import signal
import sys


def main() -> None:
    """Serve until SIGTERM."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    import xllamacpp

    port, key, file, slots, context = sys.argv[1:]
    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_parallel, params.n_ctx = int(slots), int(slots) * int(context)
    params.n_threads_http = int(slots) + 4
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.hostnames, params.port, params.api_keys = ["127.0.0.1"], int(port), [key]
    params.default_template_kwargs = {"enable_thinking": "false"}
    params.verbosity = -1
    server = xllamacpp.Server(params)
    print("listening on", server.listening_address, flush=True)
    signal.sigwait({signal.SIGTERM})


if __name__ == "__main__":
    main()

"""llama.cpp's own HTTP server, the reference: prints its address and serves until it is ended."""

import argparse
import signal
import sys

import xllamacpp


def serve(arguments: argparse.Namespace) -> None:
    """Load the model and wait; llama.cpp's threads do the serving."""
    params = xllamacpp.CommonParams()
    params.model.path = arguments.file
    params.n_parallel = arguments.slots
    params.n_ctx = arguments.slots * arguments.context_length
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = arguments.threads
    params.n_threads_http = arguments.slots + 8
    params.hostnames, params.port = ["127.0.0.1"], arguments.port
    params.default_template_kwargs = {"enable_thinking": "false"}
    params.verbosity = -1
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", required=True, help="the GGUF file")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--slots", type=int, default=8, help="sequences of the continuous batch")
    parser.add_argument("--context-length", type=int, default=2048, help="tokens per slot")
    parser.add_argument("--threads", type=int, default=1)
    serve(parser.parse_args())
    sys.exit(0)


if __name__ == "__main__":
    # Blocked before llama.cpp starts its threads, which inherit the mask: sigwait gets the signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    main()

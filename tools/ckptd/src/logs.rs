//! Logs: JSON on stderr, one object a line.
//!
//! Owns: the format and the filter. Does not own: what is said (each place that handles an error says it once).

/// Starts logging. `TIDEMARK_LOG` filters (`info` by default), in the syntax of tracing's EnvFilter.
pub(crate) fn start() {
    let filter = tracing_subscriber::EnvFilter::try_from_env("TIDEMARK_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .json()
        .flatten_event(true)
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // A terminal or a pipe that is gone takes no line, nor one that says so: that one would end the thread.
        .log_internal_errors(false)
        .init();
}

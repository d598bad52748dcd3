//! `ckptd`, as it is shipped.

fn main() -> std::process::ExitCode {
    ckptd::run(ckptd::Build { version: env!("CARGO_PKG_VERSION"), stops_at_steps: true })
}

//! `ckptd` under another version, for the tests of upgrades. The build ignores `TIDEMARK_STOP_AT`, so it mends a crash loop.

fn main() -> std::process::ExitCode {
    ckptd::run(ckptd::Build { version: "9.9.9-next", stops_at_steps: false })
}

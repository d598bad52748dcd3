//! `ckptd` under another version, for the tests of upgrades; it stops at no step, so that it mends a crash loop.

fn main() -> std::process::ExitCode {
    ckptd::run(ckptd::Build { version: "9.9.9-next", stops_at_steps: false })
}

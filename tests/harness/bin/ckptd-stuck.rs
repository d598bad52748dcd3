//! A `ckptd` that never comes to serve, for the tests of upgrades.

fn main() {
    std::thread::sleep(std::time::Duration::from_secs(3600));
}

//! Prints the readers' judgement of each file. Usage:
//! `cargo run -p tidemark-content --example judge -- FILE…`

use std::time::{Duration, Instant};
use tidemark_content::{Limits, judge};

#[expect(clippy::print_stdout, reason = "this is what it is for")]
fn main() -> std::io::Result<()> {
    for path in std::env::args().skip(1) {
        let bytes = std::fs::read(&path)?;
        let begun = Instant::now();
        let limits = Limits { cpu: Duration::from_secs(60), ..Limits::default() };
        let found = judge(&&bytes[..], bytes.len() as u64, &limits, &|| begun.elapsed());
        let format = found.format.map_or_else(|| "-".to_owned(), |format| format.to_string());
        println!("{:?}\t{format}\t{:?}\t{path}\t{}", found.verdict, begun.elapsed(), found.reason);
    }
    Ok(())
}

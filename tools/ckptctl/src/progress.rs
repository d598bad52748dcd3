//! The bar of long work: on stderr, and only when that is a terminal.
//!
//! Owns: drawing. Does not own: the numbers.

use crate::text::clean;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use tidemark_protocol::report::Progress;

/// Bytes where they are known.
const OF_BYTES: &str = "{msg:9} [{bar:30}] {percent:>3}%  {binary_bytes}/{binary_total_bytes}  {binary_bytes_per_sec}  eta {eta}";
/// Before that, only that something happens.
const OF_FILES: &str = "{msg:9} {spinner} {prefix}";

#[derive(Debug)]
pub(crate) struct Bar {
    bar: ProgressBar,
    of_bytes: bool,
}

impl Bar {
    /// A bar for `what`, in one word.
    pub(crate) fn new(what: &'static str) -> Self {
        let target = if std::io::stderr().is_terminal() {
            ProgressDrawTarget::stderr()
        } else {
            ProgressDrawTarget::hidden()
        };
        let bar = ProgressBar::with_draw_target(None, target).with_message(what);
        bar.set_style(style(OF_FILES));
        Self { bar, of_bytes: false }
    }

    pub(crate) fn show(&mut self, progress: &Progress) {
        if progress.total_bytes > 0 {
            if !self.of_bytes {
                self.bar.set_style(style(OF_BYTES));
                self.of_bytes = true;
            }
            self.bar.set_length(progress.total_bytes);
            self.bar.set_position(progress.done_bytes);
        } else {
            let now = progress.now.as_deref().unwrap_or("");
            self.bar.set_prefix(format!(
                "{}/{} files {}",
                progress.done_files,
                progress.total_files,
                clean(now)
            ));
            self.bar.tick();
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        // The result takes its line, whether the work ended or failed.
        self.bar.finish_and_clear();
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("a fixed template").progress_chars("=> ")
}

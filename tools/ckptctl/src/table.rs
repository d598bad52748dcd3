//! Tables: aligned columns without lines, colour only where the terminal takes it.
//!
//! Owns: the look. Does not own: what is in the cells.

use comfy_table::presets::NOTHING;
use comfy_table::{Cell, CellAlignment, Color, Table, TableStyle};
use std::io::{self, Write};
use tidemark_protocol::size::Shown;

const STYLE: TableStyle = NOTHING;

/// How a cell is meant. The word in it says the same, so that colour is never the only sign.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tone {
    Good,
    Doubtful,
    Bad,
}

/// A table with one heading for each column.
pub(crate) fn new<const N: usize>(headings: [&str; N]) -> Table {
    let mut table = Table::new();
    table.load_style(STYLE).set_header(headings);
    table
}

/// Writes it, indented like the lines around it.
pub(crate) fn write(table: &Table, out: &mut dyn Write) -> io::Result<()> {
    for line in table.lines() {
        writeln!(out, " {}", line.trim_end())?;
    }
    Ok(())
}

/// Text from outside.
pub(crate) fn text(text: &str) -> Cell {
    Cell::new(crate::text::clean(text))
}

/// A count or a size, to the right.
pub(crate) fn number(number: impl ToString) -> Cell {
    Cell::new(number).set_alignment(CellAlignment::Right)
}

pub(crate) fn bytes(bytes: u64) -> Cell {
    number(Shown(bytes))
}

/// A word with a tone.
pub(crate) fn word(word: &str, tone: Tone) -> Cell {
    text(word).fg(match tone {
        Tone::Good => Color::Green,
        Tone::Doubtful => Color::Yellow,
        Tone::Bad => Color::Red,
    })
}

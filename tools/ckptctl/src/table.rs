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

/// Characters of a run's name in a table.
pub(crate) const RUN_CHARS: usize = 28;
/// Longest path.
pub(crate) const PATH_CHARS: usize = 56;

/// Names from outside in a table. A long one is cut in the middle, so that it does not push the rows of others apart, and stands in
/// full below the table.
#[derive(Debug, Default)]
pub(crate) struct Names(Vec<String>);

impl Names {
    pub(crate) fn cell(&mut self, name: &str, most_chars: usize) -> Cell {
        let clean = crate::text::clean(name);
        match crate::text::cut(&clean, most_chars) {
            Some(short) => {
                if self.0.last().is_none_or(|last| *last != clean) {
                    self.0.push(clean.into_owned());
                }
                Cell::new(short)
            }
            None => Cell::new(clean),
        }
    }

    /// Writes the table, and below it the names that were cut.
    pub(crate) fn write(mut self, table: &Table, out: &mut dyn Write) -> io::Result<()> {
        write(table, out)?;
        self.0.sort_unstable();
        self.0.dedup();
        self.0.iter().try_for_each(|name| writeln!(out, " in full: {name}"))
    }
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
    toned(text(word), tone)
}

/// A cell with a tone.
pub(crate) fn toned(cell: Cell, tone: Tone) -> Cell {
    cell.fg(match tone {
        Tone::Good => Color::Green,
        Tone::Doubtful => Color::Yellow,
        Tone::Bad => Color::Red,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_name_is_cut_and_stands_in_full_below() {
        let rows = |names: &[&str]| {
            let mut table = new(["RUN", "PATH"]);
            let mut full = Names::default();
            for name in names {
                table.add_row([
                    full.cell(name, RUN_CHARS),
                    full.cell(&format!("{name}/step1.pt"), PATH_CHARS),
                ]);
            }
            let mut out = Vec::new();
            full.write(&table, &mut out).unwrap();
            String::from_utf8(out).unwrap()
        };
        let long = "x".repeat(250);
        let (alone, beside) = (rows(&["run"]), rows(&["run", &long]));
        let width = |text: &str| text.lines().map(str::len).next().unwrap();
        assert!(width(&beside) < width(&alone) + 80, "{beside}");
        assert!(beside.contains(&format!(" in full: {long}/step1.pt\n")), "{beside}");
        assert!(!alone.contains("in full"), "{alone}");
    }
}

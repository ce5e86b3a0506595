//! The methods of files are those of `std::fs`: a table says which, and what a pool does not have.
//!
//! [`table`] has a row for each stable public function and method of `std::fs`, of the file-system
//! methods of `Path`, and of `std::os::unix::fs`, as of Rust 1.90 to 1.95. It compiles only if both
//! sides exist with the argument and result types that it states, and `docs/files.md` shows it.
//! [`behaviour`] runs both sides with the same arguments.

mod behaviour;
mod table;

/// Sections of `docs/files.md` with generated content start and end with these lines.
const BEGIN: &str = "<!-- std::fs: begin -->\n";
const END: &str = "<!-- std::fs: end -->\n";

#[test]
fn the_document_shows_the_table() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/files.md");
    let document = std::fs::read_to_string(path).unwrap();
    let (before, rest) = document.split_once(BEGIN).expect("where the table begins");
    let (shown, after) = rest.split_once(END).expect("where the table ends");
    let wanted = table::as_markdown();
    if std::env::var_os("UPDATE_DOCUMENTS").is_some() {
        std::fs::write(path, [before, BEGIN, &wanted, END, after].concat()).unwrap();
    } else {
        assert_eq!(shown, wanted, "run this test with UPDATE_DOCUMENTS=1");
    }
}

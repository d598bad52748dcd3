//! Does each link, store and kernel back end keep one contract?
//!
//! Owns: the list of contracts. Each module runs one list of checks over every implementation of one trait.

mod store;

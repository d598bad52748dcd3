//! The sources of one crate as modules: the file of each, its definitions, re-exports and names.
//!
//! Owns: the reading, by `syn`. Does not own: where a name leads (`graph`), what is counted (`mod`).
//!
//! Modules that are compiled for tests only are left out, and so are the products of macros.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use syn::visit::{self, Visit};

/// A path of names, from the crate's root.
pub(crate) type ModulePath = Vec<String>;

/// A module.
#[derive(Debug, Default)]
pub(crate) struct Module {
    pub(crate) file: PathBuf,
    pub(crate) defines: BTreeSet<String>,
    /// Types among these.
    pub(crate) types: BTreeSet<String>,
    /// Names that it passes on, with where they come from as it is written.
    pub(crate) passes_on: BTreeMap<String, ModulePath>,
    /// Modules of which it passes on all.
    pub(crate) passes_on_all: Vec<ModulePath>,
    /// Paths that it imports or names, as they are written.
    pub(crate) names: BTreeSet<ModulePath>,
    /// Inherent methods, by the type's name.
    pub(crate) methods: BTreeMap<String, usize>,
}

/// Reads a crate from its root file.
pub(crate) fn read(root: &Path) -> Result<BTreeMap<ModulePath, Module>> {
    let mut modules = BTreeMap::new();
    let folder = root.parent().context("a crate's root lies in a folder")?;
    read_file(root, folder, vec![], &mut modules)?;
    Ok(modules)
}

/// `folder` is where the files of its child modules lie.
fn read_file(
    file: &Path,
    folder: &Path,
    path: ModulePath,
    modules: &mut BTreeMap<ModulePath, Module>,
) -> Result<()> {
    let text = fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
    let tree = syn::parse_file(&text).with_context(|| format!("{} is no Rust", file.display()))?;
    read_items(&tree.items, file, folder, path, modules)
}

fn read_items(
    items: &[syn::Item],
    file: &Path,
    folder: &Path,
    path: ModulePath,
    modules: &mut BTreeMap<ModulePath, Module>,
) -> Result<()> {
    let mut reader =
        Reader { module: Module { file: file.to_owned(), ..Module::default() }, words: BTreeSet::new() };
    for item in items.iter().filter(|item| !is_for_tests(attributes(item))) {
        let syn::Item::Mod(child) = item else {
            reader.visit_item(item);
            continue;
        };
        let name = child.ident.to_string();
        let path = [&path[..], std::slice::from_ref(&name)].concat();
        let below = folder.join(&name);
        match &child.content {
            Some((_, items)) => read_items(items, file, &below, path, modules)?,
            None => {
                let beside = folder.join(format!("{name}.rs"));
                let found = match named_file(&child.attrs) {
                    // Such a path begins at the file that names it.
                    Some(named) => file.with_file_name(named),
                    None if beside.exists() => beside,
                    None => below.join("mod.rs"),
                };
                read_file(&found, &below, path, modules)?;
            }
        }
    }
    modules.insert(path, reader.finish());
    Ok(())
}

/// The file that `#[path = "…"]` names.
fn named_file(attributes: &[syn::Attribute]) -> Option<String> {
    attributes.iter().find_map(|attribute| match &attribute.meta {
        syn::Meta::NameValue(pair) if pair.path.is_ident("path") => match &pair.value {
            syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(file), .. }) => Some(file.value()),
            _ => None,
        },
        _ => None,
    })
}

/// Whether it is compiled for tests only.
fn is_for_tests(attributes: &[syn::Attribute]) -> bool {
    let test = |attribute: &syn::Attribute| {
        attribute.path().is_ident("cfg")
            && attribute.parse_args::<syn::Path>().is_ok_and(|path| path.is_ident("test"))
    };
    attributes.iter().any(test)
}

fn attributes(item: &syn::Item) -> &[syn::Attribute] {
    match item {
        syn::Item::Const(item) => &item.attrs,
        syn::Item::Enum(item) => &item.attrs,
        syn::Item::Fn(item) => &item.attrs,
        syn::Item::Impl(item) => &item.attrs,
        syn::Item::Mod(item) => &item.attrs,
        syn::Item::Static(item) => &item.attrs,
        syn::Item::Struct(item) => &item.attrs,
        syn::Item::Trait(item) => &item.attrs,
        syn::Item::Type(item) => &item.attrs,
        syn::Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

struct Reader {
    module: Module,
    /// First names of paths of one name or more: a name that is passed on counts as used only where it is said.
    words: BTreeSet<String>,
}

impl Reader {
    fn finish(mut self) -> Module {
        let used = self.module.passes_on.iter().filter(|(name, _)| self.words.contains(*name));
        let used: Vec<_> = used.map(|(_, from)| from.clone()).collect();
        self.module.names.extend(used);
        self.module
    }

    fn import(&mut self, tree: &syn::UseTree, before: &ModulePath, public: bool) {
        match tree {
            syn::UseTree::Path(path) => {
                let before = [&before[..], &[path.ident.to_string()]].concat();
                self.import(&path.tree, &before, public);
            }
            syn::UseTree::Group(group) => {
                group.items.iter().for_each(|tree| self.import(tree, before, public));
            }
            syn::UseTree::Glob(_) if public => self.module.passes_on_all.push(before.clone()),
            syn::UseTree::Glob(_) => {
                self.module.names.insert(before.clone());
            }
            syn::UseTree::Name(name) => self.name(&name.ident, &name.ident, before, public),
            syn::UseTree::Rename(name) => self.name(&name.ident, &name.rename, before, public),
        }
    }

    fn name(&mut self, name: &syn::Ident, known_as: &syn::Ident, before: &ModulePath, public: bool) {
        let path = match name.to_string().as_str() {
            "self" => before.clone(),
            name => [&before[..], &[name.to_owned()]].concat(),
        };
        let known_as = match known_as.to_string() {
            word if word == "self" => path.last().cloned().unwrap_or_default(),
            word => word,
        };
        if !public {
            self.module.names.insert(path.clone());
        }
        // Others may reach it through here either way: a child sees what its parent imports.
        self.module.passes_on.insert(known_as, path);
    }

    fn define(&mut self, name: &syn::Ident, is_type: bool) {
        self.module.defines.insert(name.to_string());
        if is_type {
            self.module.types.insert(name.to_string());
        }
    }
}

impl<'ast> Visit<'ast> for Reader {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        match item {
            syn::Item::Const(item) => self.define(&item.ident, false),
            syn::Item::Static(item) => self.define(&item.ident, false),
            syn::Item::Fn(item) => self.define(&item.sig.ident, false),
            syn::Item::Enum(item) => self.define(&item.ident, true),
            syn::Item::Struct(item) => self.define(&item.ident, true),
            syn::Item::Trait(item) => self.define(&item.ident, true),
            syn::Item::Type(item) => self.define(&item.ident, true),
            syn::Item::Use(item) => {
                let public = !matches!(item.vis, syn::Visibility::Inherited);
                self.import(&item.tree, &vec![], public);
            }
            syn::Item::Impl(block) if block.trait_.is_none() => {
                let methods = block.items.iter().filter(|item| matches!(item, syn::ImplItem::Fn(_))).count();
                if let syn::Type::Path(of) = &*block.self_ty
                    && let Some(last) = of.path.segments.last()
                {
                    *self.module.methods.entry(last.ident.to_string()).or_default() += methods;
                }
            }
            _ => {}
        }
        visit::visit_item(self, item);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names: ModulePath = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        self.words.extend(names.first().cloned());
        if names.len() > 1 {
            self.module.names.insert(names);
        }
        visit::visit_path(self, path);
    }
}
